"""Does an engine sleep and wake by itself, with nobody lost?"""

from __future__ import annotations

import asyncio

import pytest
from serving_support import Engine, Held, outcome, run, until

import cumem
from cumem.serving import NotServingError, State


def test_one_wake_serves_all_that_wait() -> None:
    async def test(engine: Engine) -> None:
        await engine.controller.sleep()
        assert all(await asyncio.gather(*(engine.serve() for _ in range(20))))
        woken = [item for item in engine.controller.history if item.kind.value == "wake_up"]
        assert (len(woken), engine.served, engine.controller.refused) == (1, 20, 0)

    run(test, auto_wake=True)


def test_a_request_that_comes_while_draining_waits_for_the_wake() -> None:
    async def test(engine: Engine) -> None:
        held = await Held(engine.controller).started()
        sleep = asyncio.create_task(engine.controller.sleep())
        await until(lambda: engine.controller.state is State.DRAINING)
        late = asyncio.create_task(engine.serve())
        await until(lambda: engine.controller.waiting == 1)
        await held.end()
        assert (await sleep).tags
        assert await late
        assert engine.controller.state is State.AWAKE

    run(test, auto_wake=True)


def test_a_request_that_waits_is_served_when_the_drain_is_cancelled() -> None:
    async def test(engine: Engine) -> None:
        held = await Held(engine.controller).started()
        sleep = asyncio.create_task(outcome(engine.controller.sleep()))
        await until(lambda: engine.controller.state is State.DRAINING)
        late = asyncio.create_task(engine.serve())
        await until(lambda: engine.controller.waiting == 1)
        engine.controller.cancel()
        assert await late
        await held.end()
        await sleep

    run(test, auto_wake=True)


def test_requests_that_waited_run_before_the_next_sleep() -> None:
    async def test(engine: Engine) -> None:
        for _ in range(5):
            await engine.controller.sleep()
            request = asyncio.create_task(engine.serve())
            # A fast device may have woken and served before anyone looks.
            await until(lambda sent=request: engine.controller.waiting == 1 or sent.done())
            await engine.controller.wake_up()  # shares the wake of the request
            await engine.controller.sleep()  # at once
            assert request.done()
            assert await request
        assert engine.served == 5

    run(test, auto_wake=True)


def test_a_wait_that_takes_too_long_ends_with_a_refusal() -> None:
    async def test(engine: Engine) -> None:
        held = await Held(engine.controller).started()
        sleep = asyncio.create_task(engine.controller.sleep())
        await until(lambda: engine.controller.state is State.DRAINING)
        with pytest.raises(NotServingError, match=r"not awake within 0\.05 s") as caught:
            await engine.serve()
        assert caught.value.retry_after > 0
        await held.end()
        await sleep
        assert engine.controller.waiting == 0

    run(test, auto_wake=True, request_seconds=0.05)


def test_a_request_that_leaves_while_it_waits_is_forgotten() -> None:
    async def test(engine: Engine) -> None:
        held = await Held(engine.controller).started()
        sleep = asyncio.create_task(engine.controller.sleep())
        await until(lambda: engine.controller.state is State.DRAINING)
        late = asyncio.create_task(engine.serve())
        await until(lambda: engine.controller.waiting == 1)
        late.cancel()
        await outcome(late)
        await held.end()
        await sleep
        assert (engine.controller.state, engine.controller.waiting) == (State.ASLEEP, 0)

    run(test, auto_wake=True)


def test_an_idle_engine_sleeps_by_itself_and_wakes_for_the_next_request() -> None:
    async def test(engine: Engine) -> None:
        assert await engine.serve()
        await until(lambda: engine.controller.state is State.ASLEEP)
        assert cumem.stats().mapped_bytes == 0
        assert await engine.serve()

    run(test, auto_wake=True, idle_seconds=0.1)


def test_an_engine_that_never_had_a_request_is_idle_too() -> None:
    async def test(engine: Engine) -> None:
        await until(lambda: engine.controller.state is State.ASLEEP)

    run(test, idle_seconds=0.05)


def test_a_long_request_is_not_idle() -> None:
    async def test(engine: Engine) -> None:
        held = await Held(engine.controller).started()
        await asyncio.sleep(0.3)
        assert engine.controller.state is State.AWAKE
        assert engine.controller.history == ()
        await held.end()
        await until(lambda: engine.controller.state is State.ASLEEP)

    run(test, idle_seconds=0.1)


@pytest.mark.needs("failures")
def test_an_idle_sleep_that_fails_is_tried_again(emulator: object) -> None:
    emulator.fail("cuMemcpyDtoHAsync", code="CUDA_ERROR_UNKNOWN")  # type: ignore[attr-defined]

    async def test(engine: Engine) -> None:
        await until(lambda: engine.controller.state is State.ASLEEP)
        errors = [item.error for item in engine.controller.history]
        assert errors == ["DriverError", None]

    run(test, idle_seconds=0.05)
