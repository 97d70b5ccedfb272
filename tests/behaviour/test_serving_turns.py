"""Do requests that wait for their turn get it, and hold up no sleep until then?"""

from __future__ import annotations

import asyncio
import time

import pytest
from serving_support import Engine, Held, outcome, run, until

import cumem
from cumem.serving import NotServingError, State, TransitionTimeoutError


async def queued(engine: Engine, count: int) -> list[asyncio.Task[bool]]:
    """Requests that wait behind one that is held."""
    tasks = [asyncio.create_task(engine.serve()) for _ in range(count)]
    await until(lambda: engine.controller.waiting == count)
    return tasks


@pytest.mark.parametrize("auto_wake", [False, True])
def test_a_request_that_has_not_begun_holds_up_no_sleep(auto_wake: bool) -> None:
    async def test(engine: Engine) -> None:
        held = await Held(engine.controller).started()
        tasks = await queued(engine, 3)
        sleep = asyncio.create_task(engine.controller.sleep())
        await until(lambda: engine.controller.state is State.DRAINING)
        assert (engine.controller.in_flight, engine.controller.waiting) == (1, 3)
        assert await held.end() == "served"
        assert (await sleep).tags
        answers = await asyncio.gather(*tasks, return_exceptions=True)
        if auto_wake:
            assert answers == [True] * 3
        else:
            assert {type(answer) for answer in answers} == {NotServingError}
            assert "the engine is asleep" in str(answers[0])
            assert cumem.is_sleeping()
        assert engine.served == (3 if auto_wake else 0)
        assert (engine.controller.in_flight, engine.controller.waiting) == (0, 0)

    run(test, auto_wake=auto_wake, most_in_flight=1)


def test_turns_come_in_order_and_no_more_run_at_once_than_may() -> None:
    async def test(engine: Engine) -> None:
        running, order, most = set[int](), list[int](), 0

        async def serve(number: int) -> None:
            nonlocal most
            async with engine.controller.request():
                running.add(number)
                order.append(number)
                most = max(most, len(running))
                await asyncio.sleep(0)
                running.discard(number)

        await asyncio.gather(*(serve(number) for number in range(9)))
        await engine.controller.sleep()
        await asyncio.gather(*(serve(number) for number in range(9, 18)))
        assert (order, most) == (list(range(18)), 2)

    run(test, auto_wake=True, most_in_flight=2)


def test_where_enough_wait_a_further_one_is_refused_at_once() -> None:
    async def test(engine: Engine) -> None:
        held = await Held(engine.controller).started()
        tasks = await queued(engine, 2)
        with pytest.raises(NotServingError, match="2 wait already") as caught:
            await engine.serve()
        assert (caught.value.state, engine.controller.refused) == (State.AWAKE, 1)
        await held.end()
        assert await asyncio.gather(*tasks) == [True, True]
        assert await engine.serve()
        await engine.controller.sleep()  # those who wait for a wake count, too
        answers = await asyncio.gather(*(engine.serve() for _ in range(3)), return_exceptions=True)
        assert answers[:2] == [True, True]
        assert isinstance(answers[2], NotServingError)

    run(test, auto_wake=True, most_in_flight=1, most_waiting=2)


def test_it_is_told_to_come_back_after_as_long_as_the_last_request_took() -> None:
    async def test(engine: Engine) -> None:
        held = await Held(engine.controller).started()
        await asyncio.sleep(0.05)
        await held.end()
        held = await Held(engine.controller).started()
        (waiting,) = await queued(engine, 1)
        refused = await outcome(engine.serve())
        assert 0.05 <= refused.retry_after < 1  # 1 is for those who know of none
        await held.end()
        assert await waiting

    run(test, most_in_flight=1, most_waiting=1)


def test_neither_a_turn_nor_a_drain_before_it_is_time_that_it_waited_for_a_wake() -> None:
    async def test(engine: Engine) -> None:
        held = await Held(engine.controller).started()
        (waiting,) = await queued(engine, 1)
        await asyncio.sleep(0.06)
        with pytest.raises(TransitionTimeoutError):
            await engine.controller.sleep(timeout=0.06)
        assert not waiting.done()
        await held.end()
        assert await waiting

    run(test, auto_wake=True, most_in_flight=1, request_seconds=0.02)


def test_the_wait_for_a_wake_begins_when_memory_goes() -> None:
    async def test(engine: Engine) -> None:
        long_ago = time.perf_counter() - 1000
        await engine.controller.sleep()
        left = engine.controller.request()._patience(since=long_ago)
        assert left is not None
        assert 30 < left <= 60

    run(test, request_seconds=60)


def test_who_leaves_in_the_moment_of_its_turn_passes_it_on() -> None:
    async def test(engine: Engine) -> None:
        held = await Held(engine.controller).started()
        first, second, third = await queued(engine, 3)
        second.cancel()  # before its turn
        held.let_go.set()
        await until(lambda: engine.controller.waiting < 2)
        first.cancel()  # has its turn, or just had it
        assert await third
        await asyncio.gather(held.task, outcome(first), outcome(second))
        assert (engine.controller.in_flight, engine.controller.waiting) == (0, 0)

    run(test, most_in_flight=1)


@pytest.mark.parametrize("auto_wake", [False, True])
def test_nobody_is_forgotten_where_somebody_else_puts_memory_to_sleep(auto_wake: bool) -> None:
    async def test(engine: Engine) -> None:
        held = await Held(engine.controller).started()
        (waiting,) = await queued(engine, 1)
        cumem.sleep()
        await held.end()
        if auto_wake:
            assert await waiting
        else:
            assert isinstance(await outcome(waiting), NotServingError)

    run(test, auto_wake=auto_wake, most_in_flight=1)
