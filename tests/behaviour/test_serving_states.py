"""Does an engine go through its states as it should, one transition at a time?"""

from __future__ import annotations

import asyncio

import pytest
from serving_support import Engine, Gate, Held, outcome, run, until
from support import fill_pattern, holds_pattern

import cumem
from cumem import AsleepError, BusyError
from cumem.serving import (
    NotServingError,
    SleepController,
    State,
    TransitionCancelledError,
    TransitionTimeoutError,
)


def test_an_engine_sleeps_and_wakes_with_its_contents() -> None:
    async def test(engine: Engine) -> None:
        controller = engine.controller
        assert (controller.state, controller.sleeping_tags) == (State.AWAKE, frozenset())
        slept = await controller.sleep()
        assert slept.tags == controller.sleeping_tags == {"weights", "kv_cache"}
        assert (controller.state, cumem.stats().mapped_bytes) == (State.ASLEEP, 0)
        woken = await controller.wake_up()
        assert (woken.tags, woken.undefined) == (slept.tags, {"kv_cache"})
        assert controller.state is State.AWAKE
        assert await engine.serve()

    run(test)


def test_requests_end_before_memory_goes_and_new_ones_are_refused_meanwhile() -> None:
    async def test(engine: Engine) -> None:
        held = await Held(engine.controller).started()
        sleep = asyncio.create_task(engine.controller.sleep())
        await until(lambda: engine.controller.state is State.DRAINING)
        with pytest.raises(NotServingError, match="the engine is draining"):
            await engine.serve()
        assert not cumem.is_sleeping()
        assert await held.end() == "served"
        assert (await sleep).tags
        with pytest.raises(NotServingError, match=r"is asleep \(asleep: 'kv_cache', 'weights'\)"):
            await engine.serve()
        assert (engine.served, engine.controller.refused) == (0, 2)

    run(test)


def test_work_in_a_thread_counts_until_it_has_ended() -> None:
    async def test(engine: Engine) -> None:
        loop, started, let_go = asyncio.get_running_loop(), asyncio.Event(), asyncio.Event()

        def work() -> bool:
            loop.call_soon_threadsafe(started.set)
            asyncio.run_coroutine_threadsafe(let_go.wait(), loop).result(20)
            return engine.read()

        async def request() -> bool:
            async with engine.controller.request() as this:
                return await this.run(work)

        task = asyncio.create_task(request())
        await started.wait()
        task.cancel()  # the client has gone; its thread has not
        sleep = asyncio.create_task(engine.controller.sleep())
        await asyncio.sleep(0.05)
        assert (engine.controller.in_flight, cumem.is_sleeping()) == (1, False)
        let_go.set()
        with pytest.raises(asyncio.CancelledError):
            await task
        await sleep
        assert engine.served == 1

    run(test)


def test_a_staged_wake_refuses_requests_until_every_tag_is_up() -> None:
    async def test(engine: Engine) -> None:
        controller = engine.controller
        await controller.sleep(level=2)
        assert (await controller.wake_up(["weights"])).tags == {"weights"}
        assert (controller.state, controller.sleeping_tags) == (State.PARTLY_AWAKE, {"kv_cache"})
        with pytest.raises(NotServingError, match=r"partly awake \(asleep: 'kv_cache'\)"):
            await engine.serve()
        fill_pattern(engine.weights, 1)
        assert (await controller.wake_up(["weights"])).tags == frozenset()  # a repeat
        assert (await controller.wake_up(["kv_cache"])).tags == {"kv_cache"}
        assert controller.state is State.AWAKE
        assert await engine.serve()

    run(test, auto_wake=True)


def test_identical_calls_share_one_transition() -> None:
    async def test(engine: Engine) -> None:
        controller = engine.controller
        slept = await asyncio.gather(*(controller.sleep() for _ in range(5)))
        woken = await asyncio.gather(*(controller.wake_up() for _ in range(5)))
        assert all(report is slept[0] for report in slept)
        assert all(report is woken[0] for report in woken)
        assert (await controller.wake_up()).tags == frozenset()
        assert [item.kind.value for item in controller.history] == ["sleep", "wake_up"]

    run(test)


def test_another_transition_meanwhile_is_refused() -> None:
    async def test(engine: Engine) -> None:
        controller, gate = engine.controller, Gate()
        registered = controller.before("sleep", gate.hook)
        sleep = asyncio.create_task(controller.sleep())
        await gate.reached.wait()
        with pytest.raises(BusyError, match="a sleep with other arguments is under way"):
            await controller.sleep(2)
        for other in (controller.wake_up(), controller.wake_up(["weights"])):
            with pytest.raises(BusyError, match="wake_up: a sleep is under way"):
                await other
        assert not controller.cancel()  # too late
        gate.opened.set()
        assert (await sleep).tags
        registered.remove()

    run(test)


def test_a_caller_that_leaves_does_not_stop_the_transition() -> None:
    async def test(engine: Engine) -> None:
        held = await Held(engine.controller).started()
        callers = [asyncio.create_task(engine.controller.sleep()) for _ in range(2)]
        await until(lambda: engine.controller.state is State.DRAINING)
        callers[0].cancel()
        await held.end()
        assert (await callers[1]).tags
        assert callers[0].cancelled()

    run(test)


@pytest.mark.parametrize("how", ["cancel", "wake_up"])
def test_a_drain_can_be_cancelled(how: str) -> None:
    async def test(engine: Engine) -> None:
        controller = engine.controller
        held = await Held(controller).started()
        sleep = asyncio.create_task(controller.sleep())
        await until(lambda: controller.state is State.DRAINING)
        if how == "cancel":
            assert controller.cancel()
        else:
            assert (await controller.wake_up()).tags == frozenset()
        with pytest.raises(TransitionCancelledError, match="Nothing was put to sleep"):
            await sleep
        assert controller.state is State.AWAKE
        assert await engine.serve()
        assert await held.end() == "served"
        assert not controller.cancel()

    run(test)


@pytest.mark.parametrize("limit", [{"drain_seconds": 0.05}, {"timeout": 0.05}])
def test_a_drain_that_takes_too_long_is_given_up(limit: dict[str, float]) -> None:
    timeout = limit.pop("timeout", None)

    async def test(engine: Engine) -> None:
        held = await Held(engine.controller).started()
        with pytest.raises(TransitionTimeoutError, match=r"1 request\(s\) were still running"):
            await engine.controller.sleep(timeout=timeout)
        assert engine.controller.state is State.AWAKE
        assert await held.end() == "served"
        assert (await engine.controller.sleep()).tags

    run(test, **limit)


def test_a_wake_goes_on_after_its_caller_has_waited_long_enough() -> None:
    async def test(engine: Engine) -> None:
        controller, gate = engine.controller, Gate()
        await controller.sleep()
        controller.before("wake_up", gate.hook)
        with pytest.raises(TransitionTimeoutError, match="The wake goes on"):
            await controller.wake_up(timeout=0.05)
        assert controller.state is State.WAKING
        gate.opened.set()
        assert (await controller.wake_up()).tags == {"weights", "kv_cache"}

    run(test)


def test_a_request_cannot_wait_for_itself() -> None:
    async def test(engine: Engine) -> None:
        async with engine.controller.request():
            with pytest.raises(BusyError, match="from inside a request"):
                await engine.controller.sleep()
        assert engine.controller.state is State.AWAKE

    run(test)


def test_level_0_lets_requests_end_and_keeps_the_memory() -> None:
    async def test(engine: Engine) -> None:
        assert (await engine.controller.sleep(0)).tags == frozenset()
        assert await engine.serve()
        assert holds_pattern(engine.kv, 2)

    run(test)


def test_memory_that_somebody_else_moves_is_seen() -> None:
    async def test(engine: Engine) -> None:
        cumem.sleep(tags=["kv_cache"])
        assert engine.controller.state is State.ASLEEP
        with pytest.raises(NotServingError):
            await engine.serve()
        cumem.wake_up()
        assert await engine.serve()

    run(test)


def test_another_engines_tags_are_left_alone() -> None:
    async def test(engine: Engine) -> None:
        async with SleepController(tags=["weights"]) as controller:
            assert (await controller.sleep()).tags == {"weights"}
            with pytest.raises(ValueError, match="'kv_cache' is not one of this engine's"):
                await controller.wake_up(["kv_cache"])
            await controller.wake_up()
            cumem.sleep(tags=["kv_cache"])
            assert controller.state is State.AWAKE

    run(test)


def test_modules_are_guarded_until_the_controller_is_closed() -> None:
    async def test(engine: Engine) -> None:
        import torch

        with cumem.use_memory_pool("weights"):
            module = torch.nn.Linear(4, 4, device=cumem.default_device())
        data = torch.zeros(1, 4, device=cumem.default_device())
        async with SleepController(modules=[module]) as controller:
            await controller.sleep()
            with pytest.raises(AsleepError, match="'weight'"):
                module(data)
            await controller.wake_up()
            module(data)
        assert not module._forward_pre_hooks

    run(test)


def test_a_closed_controller_refuses_and_leaves_memory_as_it_is() -> None:
    async def test(engine: Engine) -> None:
        await engine.controller.sleep()
        await engine.controller.close()
        assert cumem.is_sleeping()
        for call in (engine.controller.wake_up(), engine.controller.sleep()):
            assert isinstance(await outcome(call), BusyError)
        with pytest.raises(NotServingError, match="shutting down"):
            await engine.serve()

    run(test)
