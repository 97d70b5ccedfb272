"""Who waits for a model, in which order, and is anybody held up for nothing?"""

from __future__ import annotations

import asyncio
import random
import threading

import pytest
from model_host_support import MODEL, Model, awake, host_of, run, settled, touch
from support import DriverUnderTest

import cumem
from cumem.serving import ModelHost


def test_hints_wake_what_will_be_wanted() -> None:
    async def work() -> None:
        async with host_of() as host:
            await touch(host, "abc")
            host.prewake("a")
            await settled(host)
            assert awake(host) == "ac"
            hits = host.status().hits
            await touch(host, "a")
            assert host.status().hits == hits + 1
            host.prewake("a")  # it is there
            with pytest.raises(ValueError, match="unknown model 'nobody'; known models: 'a'"):
                host.prewake("nobody")

    run(work)


def test_a_hint_waits_for_models_in_use() -> None:
    async def work() -> None:
        async with host_of(room=1) as host:
            async with host.use("a"):
                host.prewake("b")
                await asyncio.sleep(0.05)
                assert awake(host) == "a"
            await settled(host)
            assert awake(host) == "b"

    run(work)


def test_priority_decides_among_those_who_wait() -> None:
    async def work() -> None:
        order: list[str] = []

        async def one(name: str, priority: int) -> None:
            async with host.use(name, priority=priority):
                order.append(name)

        async with host_of(room=1) as host:
            await touch(host, "abc")
            async with host.use("a"):
                tasks = [asyncio.ensure_future(one("b", 0)), asyncio.ensure_future(one("c", 5))]
                await asyncio.sleep(0.02)
            await asyncio.gather(*tasks)
        assert order == ["c", "b"]

    run(work)


def test_who_gives_up_waiting_holds_nobody_up() -> None:
    async def work() -> None:
        async with host_of(room=1) as host:
            await touch(host, "ab")
            async with host.use("a"):
                with pytest.raises(asyncio.TimeoutError):
                    await asyncio.wait_for(touch(host, "b"), 0.02)
                await touch(host, "a")  # it would drain for who does not wait any more
            assert all(model.waiting == model.users == 0 for model in host.status().models)
            await touch(host, "b")

    run(work)


def test_who_gives_up_during_the_move_leaves_the_model_idle() -> None:
    async def work() -> None:
        release = threading.Event()

        def build() -> Model:
            assert release.wait(20)
            return Model(4)

        async with host_of("b", room=1) as host:
            host.add("slow", build, bytes=MODEL)
            waiting = asyncio.ensure_future(touch(host, ["slow"]))
            await asyncio.sleep(0.02)
            waiting.cancel()
            await asyncio.gather(waiting, return_exceptions=True)
            release.set()
            await settled(host)
            assert awake(host) == "slow"
            await touch(host, "b")

    run(work)


def test_the_loop_goes_on_while_models_move() -> None:
    async def work() -> None:
        release = threading.Event()
        turns = 0

        def build() -> Model:
            assert release.wait(20)
            return Model(0)

        async with ModelHost(MODEL) as host:
            host.add("slow", build, bytes=MODEL)
            waiting = asyncio.ensure_future(touch(host, ["slow"]))
            for _ in range(20):
                await asyncio.sleep(0.001)
                turns += 1
            assert not waiting.done()
            release.set()
            await waiting
            assert turns == 20

    run(work)


def test_many_tasks_are_all_served() -> None:
    """A trace of requests with random models, priorities and times, under a small budget."""

    async def work() -> None:
        chance = random.Random(7)
        served: list[str] = []
        most = 0

        async def client(names: list[str]) -> None:
            nonlocal most
            for name in names:
                async with host.use(name, priority=chance.randint(0, 3)) as model:
                    assert model.is_whole()
                    most = max(most, host.status().mapped_bytes)
                    await asyncio.sleep(chance.random() * 0.003)
                    assert cumem.is_mapped(model.weight)
                    served.append(name)

        async with host_of("abcde", patience=4) as host:
            trace = [[chance.choice("aabcde") for _ in range(6)] for _ in range(24)]
            await asyncio.gather(*(client(names) for names in trace))
            status = host.status()
        assert sorted(served) == sorted(name for names in trace for name in names)
        assert most <= 2 * MODEL
        assert status.failures == 0
        # Those who wait for the same model share a move.
        assert status.moves < len(served)

    run(work)


def test_a_stream_of_uses_of_one_model_starves_nobody() -> None:
    async def work() -> None:
        done = asyncio.Event()
        turns = 0

        async def stream() -> None:
            nonlocal turns
            while not done.is_set():
                async with host.use("a", priority=9):
                    turns += 1
                    await asyncio.sleep(0.001)

        async with host_of(room=1, patience=5) as host:
            await touch(host, "ba")
            streams = [asyncio.ensure_future(stream()) for _ in range(4)]
            await asyncio.sleep(0.02)
            before = turns
            await touch(host, "b")
            done.set()
            await asyncio.gather(*streams)
        assert turns - before < 60

    run(work)


@pytest.mark.needs("captures that can be steered")
def test_a_move_waits_for_the_end_of_a_capture(driver: DriverUnderTest) -> None:
    async def work() -> None:
        async with host_of(room=1, busy_seconds=20.0) as host:
            await touch(host, "ab")
            driver.emulator.begin_capture()
            waiting = asyncio.ensure_future(touch(host, "a"))
            await asyncio.sleep(0.05)
            assert not waiting.done()
            driver.emulator.end_capture()
            await waiting
        async with host_of(room=1, busy_seconds=0.01) as host:
            await touch(host, "ab")
            driver.emulator.begin_capture()
            with pytest.raises(cumem.BusyError):
                await touch(host, "a")
            driver.emulator.end_capture()
            await touch(host, "a")

    run(work)


def test_two_tasks_may_remove_a_model_while_another_moves() -> None:
    async def work() -> None:
        async with host_of() as host:
            host.prewake("b")
            calls = (host.remove("a"), host.remove("a"))
            first, second = await asyncio.gather(*calls, return_exceptions=True)
            assert first is None
            assert isinstance(second, ValueError)
            host.prewake("c")
            calls = (host.close(), host.close(), host.remove("b"))
            first, second, _ = await asyncio.gather(*calls, return_exceptions=True)
            assert (first, second) == (None, None)
            assert host.status().models == ()

    run(work)


def test_who_leaves_while_a_model_is_removed_holds_nobody_up() -> None:
    async def work() -> None:
        async with host_of("b", room=1) as host:
            host.add("a", lambda: Model(7), bytes=MODEL, pinned=True)
            await touch(host, "a")
            host.prewake("b")  # and waits: what has its room is pinned
            removal = asyncio.ensure_future(host.remove("a"))
            await asyncio.sleep(0)
            removal.cancel()
            with pytest.raises(asyncio.CancelledError):
                await removal
            await settled(host)
            assert awake(host) == "b"

    run(work)


def test_close_refuses_who_waits() -> None:
    async def work() -> None:
        async with host_of(room=1) as host:
            await touch(host, "b")
            async with host.use("a"):
                waiting = asyncio.ensure_future(touch(host, "b"))
                await asyncio.sleep(0.01)
                with pytest.raises(cumem.BusyError, match="in use: 'a'"):
                    await host.close()
                with pytest.raises(cumem.CumemError, match="was closed"):
                    await waiting
            with pytest.raises(cumem.CumemError, match="was closed"):
                await touch(host, "a")

    run(work)
