"""Is the state exact, and is everybody told, when a transition fails?"""

from __future__ import annotations

import asyncio
import threading

import pytest
from serving_support import Engine, Gate, Held, outcome, run, until
from support import MIB, make

import cumem
from cumem import BusyError, CumemError, DeviceOutOfMemoryError, DriverError
from cumem.serving import NotServingError, RequestAbortedError, State
from cumem.testing import EmulatedDriver

pytestmark = pytest.mark.usefixtures("driver")


def test_abort_ends_requests_and_says_so() -> None:
    async def test(engine: Engine) -> None:
        held = [await Held(engine.controller).started() for _ in range(3)]
        assert (await engine.controller.sleep(mode="abort")).tags
        for request in held:
            assert isinstance(await outcome(request.task), RequestAbortedError)
            assert not request.task.cancelled()
        assert engine.controller.in_flight == 0

    run(test)


def test_abort_ends_what_an_earlier_call_waits_for() -> None:
    async def test(engine: Engine) -> None:
        held = await Held(engine.controller).started()
        patient = asyncio.create_task(engine.controller.sleep())
        await until(lambda: engine.controller.state is State.DRAINING)
        report = await engine.controller.sleep(mode="abort")
        assert report is await patient
        assert isinstance(await outcome(held.task), RequestAbortedError)

    run(test)


def test_abort_waits_for_work_in_threads_which_is_told() -> None:
    async def test(engine: Engine) -> None:
        started, seen = threading.Event(), []

        async def request() -> None:
            async with engine.controller.request() as this:

                def work() -> None:
                    started.set()
                    while not this.aborted:
                        assert engine.read()
                    seen.append(cumem.is_sleeping())

                await this.run(work)

        task = asyncio.create_task(request())
        await until(started.is_set)
        await engine.controller.sleep(mode="abort")
        assert seen == [False]
        assert isinstance(await outcome(task), RequestAbortedError)

    run(test)


def test_an_abort_that_comes_too_late_does_not_reach_what_follows() -> None:
    async def test(engine: Engine) -> None:
        after = []

        async def request() -> str:
            async with engine.controller.request():
                asyncio.create_task(engine.controller.sleep(mode="abort"))  # noqa: RUF006
                try:
                    await asyncio.sleep(20)
                except asyncio.CancelledError:
                    after.append("cleaned up")
            await asyncio.sleep(0.01)
            return "went on"

        assert await request() == "went on"
        assert after == ["cleaned up"]
        await until(lambda: engine.controller.state is State.ASLEEP)

    run(test)


@pytest.mark.skipif(not hasattr(asyncio.Task, "uncancel"), reason="needs Python 3.11")
@pytest.mark.parametrize("ends", ["well", "cancelled"])
def test_who_is_cancelled_besides_an_abort_stays_cancelled(ends: str) -> None:
    async def test(engine: Engine) -> None:
        async def request() -> None:
            async with engine.controller.request() as this:
                this.abort()
                this.task.cancel()
                if ends == "cancelled":
                    await asyncio.sleep(20)
            await asyncio.sleep(0)

        task = asyncio.create_task(request())
        await asyncio.wait([task])
        assert task.cancelled()
        assert engine.controller.in_flight == 0

    run(test)


@pytest.mark.needs("failures")
def test_a_sleep_that_fails_leaves_the_engine_serving(emulator: EmulatedDriver) -> None:
    async def test(engine: Engine) -> None:
        emulator.fail("cuMemcpyDtoHAsync", code="CUDA_ERROR_UNKNOWN")
        with pytest.raises(DriverError):
            await engine.controller.sleep()
        assert engine.controller.state is State.AWAKE
        assert await engine.serve()
        assert [item.error for item in engine.controller.history] == ["DriverError"]
        assert (await engine.controller.sleep()).tags == {"weights", "kv_cache"}

    run(test)


@pytest.mark.needs("failures")
def test_a_wake_without_memory_is_told_to_all_and_can_be_repeated(
    emulator: EmulatedDriver,
) -> None:
    async def test(engine: Engine) -> None:
        controller, gate = engine.controller, Gate()
        controller.before("wake_up", gate.hook)
        await controller.sleep()
        emulator.fail("cuMemCreate")
        emulator.fail("cuMemCreate", nth=2)  # after torch's caches were cleared
        requests = [asyncio.create_task(engine.serve()) for _ in range(4)]
        await until(lambda: controller.waiting == 4)
        wake = asyncio.create_task(outcome(controller.wake_up()))
        await asyncio.sleep(0)
        gate.opened.set()
        failure = await wake
        assert isinstance(failure, DeviceOutOfMemoryError)
        for answer in await asyncio.gather(*requests, return_exceptions=True):
            assert isinstance(answer, NotServingError)
            assert "the wake failed: " in str(answer)
            assert answer.state is State.ASLEEP
        assert (controller.state, controller.waiting) == (State.ASLEEP, 0)
        assert await engine.serve()  # wakes it

    run(test, auto_wake=True)


@pytest.mark.needs("failures")
def test_a_sleep_that_stops_half_way_has_an_exact_state(
    emulator: EmulatedDriver, driver: object
) -> None:
    driver.tolerates_refusals = True  # type: ignore[attr-defined]

    async def test(engine: Engine) -> None:
        emulator.fail("cuMemUnmap", nth=2, code="CUDA_ERROR_UNKNOWN")
        with pytest.raises(DriverError):
            await engine.controller.sleep()
        assert engine.controller.sleeping_tags == cumem.sleeping_tags() != frozenset()
        assert engine.controller.state is State.ASLEEP
        with pytest.raises(NotServingError):
            await engine.serve()
        await engine.controller.wake_up()
        assert await engine.serve()

    run(test)


def test_an_open_scope_makes_a_sleep_busy_and_the_engine_serves_on() -> None:
    async def test(engine: Engine) -> None:
        with cumem.use_memory_pool("weights"):
            more = make(MIB, 3)
            with pytest.raises(BusyError, match="has a scope"):
                await engine.controller.sleep()
        assert more is not None
        assert engine.controller.state is State.AWAKE
        assert await engine.serve()

    run(test)


def test_hooks_run_around_the_memory_in_order_and_off_the_loop() -> None:
    async def test(engine: Engine) -> None:
        controller, calls = engine.controller, []
        loop_thread = threading.current_thread()

        def note(name: str) -> None:
            here = threading.current_thread() is loop_thread
            calls.append((name, cumem.is_sleeping(), controller.in_flight, here))

        async def note_on_loop() -> None:
            note("coroutine")

        controller.before("sleep", lambda: note("before sleep"))
        controller.before("sleep", note_on_loop)
        controller.before("sleep", lambda: note_on_loop())
        controller.after("sleep", lambda: note("after sleep"))
        controller.before("wake_up", lambda: note("before wake"))
        controller.after("wake_up", lambda: note("after wake"))
        held = await Held(controller).started()
        sleep = asyncio.create_task(controller.sleep())
        await until(lambda: controller.state is State.DRAINING)
        await held.end()
        await sleep
        await controller.sleep()  # nothing to do: no hook hears of it
        await controller.wake_up()
        assert calls == [
            ("before sleep", False, 0, False),
            ("coroutine", False, 0, True),
            ("coroutine", False, 0, True),
            ("after sleep", True, 0, False),
            ("before wake", True, 0, False),
            ("after wake", False, 0, False),
        ]

    run(test)


@pytest.mark.parametrize("transition", ["sleep", "wake_up"])
def test_a_before_hook_that_raises_gives_the_transition_up(transition: str) -> None:
    async def test(engine: Engine) -> None:
        controller, again = engine.controller, []
        if transition == "wake_up":
            await controller.sleep()
        was = controller.sleeping_tags
        registered = controller.before(transition, lambda: 1 // 0)
        back = {"sleep": "wake_up", "wake_up": "sleep"}[transition]
        controller.after(back, lambda: again.append(back))
        said = "raised ZeroDivisionError: .*was given up; the memory is as it was"
        with pytest.raises(CumemError, match=said) as caught:
            await getattr(controller, transition)()
        assert isinstance(caught.value.__cause__, ZeroDivisionError)
        assert controller.sleeping_tags == was
        assert again == [back]  # what was dropped before can be taken again
        registered.remove()
        assert (await getattr(controller, transition)()).tags

    run(test)


def test_an_after_hook_that_raises_is_reported_and_the_others_run(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def test(engine: Engine) -> None:
        controller, ran = engine.controller, []
        controller.after("sleep", lambda: 1 // 0)
        controller.after("sleep", lambda: {}["second"])
        controller.after("sleep", lambda: ran.append(1))
        with pytest.raises(CumemError, match="after sleep, raised ZeroDivisionError: integer"):
            await controller.sleep()
        assert (controller.state, ran) == (State.ASLEEP, [1])
        assert controller.history[-1].error == "CumemError"

    run(test)
    for line in ("1 // 0", '{}["second"]'):  # the log has both tracebacks
        assert f'controller.after("sleep", lambda: {line})' in caplog.text


def test_a_hook_that_is_registered_twice_is_taken_back_once_by_each() -> None:
    async def test(engine: Engine) -> None:
        calls: list[None] = []

        def hook() -> None:
            calls.append(None)

        first, _ = (engine.controller.before("sleep", hook) for _ in range(2))
        first.remove()
        first.remove()
        await engine.controller.sleep()
        assert len(calls) == 1

    run(test)


def test_an_observer_that_fails_disturbs_nobody(caplog: pytest.LogCaptureFixture) -> None:
    async def test(engine: Engine) -> None:
        seen = []
        engine.controller.observe(lambda transition: 1 // 0)
        registered = engine.controller.observe(seen.append)
        await engine.controller.sleep()
        registered.remove()
        await engine.controller.wake_up()
        assert [item.kind.value for item in seen] == ["sleep"]

    run(test)
    assert "an observer of transitions failed" in caplog.text


def test_closing_gives_up_a_drain_and_refuses_who_waits() -> None:
    async def test(engine: Engine) -> None:
        controller, gate = engine.controller, Gate()
        await controller.sleep()
        controller.before("wake_up", gate.hook)
        waiting = asyncio.create_task(engine.serve())
        await gate.reached.wait()
        closing = asyncio.create_task(controller.close())
        assert isinstance(await outcome(waiting), NotServingError)
        gate.opened.set()
        await closing
        assert controller.state is State.AWAKE

    run(test, auto_wake=True)
