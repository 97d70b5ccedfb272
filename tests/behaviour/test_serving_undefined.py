"""Are requests kept from memory whose contents a sleep has discarded?"""

from __future__ import annotations

import asyncio

import pytest
from serving_support import Engine, Held, outcome, run, until
from support import fill_pattern

import cumem
from cumem import CumemError
from cumem.serving import NotServingError, State

WHAT_TO_DO = r"the contents of 'weights' were discarded.*load their contents.*controller\.restore"


def test_no_request_wakes_an_engine_that_has_lost_its_weights() -> None:
    async def test(engine: Engine) -> None:
        await engine.controller.sleep(level=2)
        with pytest.raises(NotServingError, match=WHAT_TO_DO):
            await engine.serve()
        assert (engine.controller.state, engine.served) == (State.ASLEEP, 0)
        await engine.controller.wake_up(["weights"])
        assert engine.controller.state is State.PARTLY_AWAKE
        fill_pattern(engine.weights, 1)
        await engine.controller.wake_up()
        assert await engine.serve()

    run(test, auto_wake=True)


def test_what_somebody_else_discarded_counts_too() -> None:
    async def test(engine: Engine) -> None:
        cumem.sleep(offload_tags=["kv_cache"])
        with pytest.raises(NotServingError, match=WHAT_TO_DO):
            await engine.serve()

    run(test, auto_wake=True)


def test_who_waits_when_the_weights_go_is_refused() -> None:
    async def test(engine: Engine) -> None:
        held = await Held(engine.controller).started()
        sleep = asyncio.create_task(engine.controller.sleep(level=2))
        await until(lambda: engine.controller.state is State.DRAINING)
        late = asyncio.create_task(outcome(engine.serve()))
        await until(lambda: engine.controller.waiting == 1)
        await held.end()
        assert (await sleep).tags
        refusal = await late
        assert isinstance(refusal, NotServingError)
        assert "were discarded" in str(refusal)
        assert engine.controller.state is State.ASLEEP

    run(test, auto_wake=True)


def test_what_is_kept_and_what_is_meant_to_be_lost_hold_nobody_up() -> None:
    async def test(engine: Engine) -> None:
        cumem.keep(engine.weights)
        await engine.controller.sleep(level=2)
        assert await engine.serve()

    run(test, auto_wake=True)


@pytest.mark.parametrize("on_loop", [False, True])
def test_a_restore_hook_fills_what_was_lost_before_anybody_is_served(on_loop: bool) -> None:
    async def test(engine: Engine) -> None:
        told: list[frozenset[str]] = []

        def fill(tags: frozenset[str]) -> None:
            assert engine.controller.state is State.WAKING
            told.append(tags)
            fill_pattern(engine.weights, 1)

        async def fill_on_loop(tags: frozenset[str]) -> None:
            fill(tags)

        engine.controller.restore(fill_on_loop if on_loop else fill)
        engine.controller.after("wake_up", lambda: told.append(frozenset({"after"})))
        await engine.controller.sleep()
        assert await engine.serve()
        assert told == [{"after"}]  # nothing was lost
        await engine.controller.sleep(level=2)
        assert all(await asyncio.gather(*(engine.serve() for _ in range(3))))
        assert told == [{"after"}, {"weights"}, {"after"}]

    run(test, auto_wake=True)


@pytest.mark.parametrize("slept_again", [False, True])
def test_nothing_is_served_before_a_restore_has_succeeded(slept_again: bool) -> None:
    async def test(engine: Engine) -> None:
        controller, attempts = engine.controller, []

        def fill(_tags: frozenset[str]) -> None:
            attempts.append(1)
            if len(attempts) == 1:
                raise OSError("the checkpoint is gone")
            fill_pattern(engine.weights, 1)

        controller.restore(fill)
        await controller.sleep(level=2)
        with pytest.raises(
            CumemError, match=r"raised OSError: the checkpoint is gone\. .*'weights'"
        ):
            await controller.wake_up()
        assert (controller.state, controller.sleeping_tags) == (State.PARTLY_AWAKE, frozenset())
        with pytest.raises(NotServingError, match="partly awake"):
            await engine.serve()
        if slept_again:  # the undefined bytes are backed up, and are still undefined
            await controller.sleep()
        await controller.wake_up()
        assert (controller.state, len(attempts)) == (State.AWAKE, 2)
        assert await engine.serve()

    run(test)


def test_a_request_tries_a_restore_again() -> None:
    async def test(engine: Engine) -> None:
        failing = engine.controller.restore(lambda _tags: 1 // 0)
        await engine.controller.sleep(level=2)
        with pytest.raises(NotServingError, match=r"ZeroDivisionError: .*no request is served"):
            await engine.serve()
        failing.remove()
        with pytest.raises(NotServingError, match="were discarded"):
            await engine.serve()
        engine.controller.restore(lambda _tags: fill_pattern(engine.weights, 1))
        assert await engine.serve()

    run(test, auto_wake=True)
