"""Do several models share a device under a budget, each whole whenever it is used?"""

from __future__ import annotations

import asyncio
import random
import threading
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, TypeVar

import pytest
import torch
from safetensors.torch import save_file
from support import MIB, DriverUnderTest, fill_pattern, holds_pattern, make, make_as

import cumem
from cumem.serving import ModelHost
from cumem.serving._schedule import ModelState

_T = TypeVar("_T")

WEIGHT = MIB
MODEL = 2 * MIB  # the segment it is in, with room for another


class Model(torch.nn.Module):
    """One large parameter with contents of its own."""

    def __init__(self, seed: int, count: int = WEIGHT // 4) -> None:
        super().__init__()
        self.seed = seed
        tensor = make_as(torch.float32, (count,), seed)
        self.weight = torch.nn.Parameter(tensor, requires_grad=False)

    def is_whole(self) -> bool:
        return cumem.is_mapped(self.weight) and holds_pattern(self.weight, self.seed)


def run(work: Callable[[], Awaitable[_T]]) -> _T:
    async def bounded() -> _T:
        return await asyncio.wait_for(work(), 100)

    return asyncio.run(bounded())


@asynccontextmanager
async def host_of(names: str = "abc", *, room: int = 2, **options: Any) -> AsyncIterator[ModelHost]:
    """A host with models of equal size and room for some of them."""
    async with ModelHost(room * MODEL, **options) as host:
        for seed, name in enumerate(names):
            host.add(name, lambda seed=seed: Model(seed), bytes=MODEL)
        yield host


def states(host: ModelHost) -> dict[str, ModelState]:
    return {model.name: model.state for model in host.status().models}


def awake(host: ModelHost) -> str:
    found = [name for name, state in states(host).items() if state is ModelState.AWAKE]
    return "".join(sorted(found))


async def touch(host: ModelHost, names: str) -> None:
    for name in names:
        async with host.use(name) as model:
            assert model.is_whole()


async def settled(host: ModelHost) -> None:
    while any(state is ModelState.MOVING for state in states(host).values()):
        await asyncio.sleep(0.001)


def test_a_model_is_built_at_its_first_use_and_then_kept(driver: DriverUnderTest) -> None:
    async def work() -> None:
        async with host_of() as host:
            assert set(states(host).values()) == {ModelState.NEW}
            async with host.use("a") as first:
                assert first.is_whole()
                assert awake(host) == "a"
            async with host.use("a") as again:
                assert again is first
            status = host.status()
            assert (status.hits, status.moves, status.failures) == (1, 1, 0)
            assert (status.mapped_bytes, status.budget_bytes) == (MODEL, 2 * MODEL)
            assert "a: awake" in str(status)
            del first, again

    run(work)


def test_the_least_recently_used_goes_to_sleep(driver: DriverUnderTest) -> None:
    async def work() -> None:
        async with host_of() as host:
            used = driver.used_bytes()
            await touch(host, "aba")
            await touch(host, "c")
            assert awake(host) == "ac"
            await touch(host, "b")
            assert awake(host) == "bc"
            assert driver.used_bytes() - used == 2 * MODEL
            await touch(host, "abcabccab")

    run(work)


def test_one_in_use_never_sleeps() -> None:
    async def work() -> None:
        async with host_of(room=1) as host:
            async with host.use("a") as model:
                waiting = asyncio.ensure_future(touch(host, "b"))
                await asyncio.sleep(0.05)
                assert not waiting.done()
                assert model.is_whole()
            del model
            await waiting
            assert awake(host) == "b"

    run(work)


def test_a_switch_of_the_library_makes_room(monkeypatch: pytest.MonkeyPatch) -> None:
    from cumem.serving import _moves

    switched: list[tuple[list[str], list[str]]] = []

    def counted(*, sleep_tags: list[str], wake_tags: list[str]) -> cumem.SwitchReport:
        switched.append((sleep_tags, wake_tags))
        return cumem.switch(sleep_tags=sleep_tags, wake_tags=wake_tags)

    monkeypatch.setattr(_moves, "switch", counted)

    async def work() -> None:
        async with host_of(room=1) as host:
            await touch(host, "aba")
            assert switched == [(["host/b/weights"], ["host/a/weights"])]

    run(work)


def test_a_pinned_model_stays() -> None:
    async def work() -> None:
        async with ModelHost(2 * MODEL) as host:
            host.add("pinned", lambda: Model(0), bytes=MODEL, pinned=True)
            for name in "ab":
                host.add(name, lambda: Model(1), bytes=MODEL)
            await touch(host, ["pinned", *"abab"])
            assert awake(host) == "bpinned"
            with pytest.raises(cumem.DeviceOutOfMemoryError, match="beside what is pinned"):
                host.add("large", lambda: Model(2), bytes=2 * MODEL)
            assert "large" not in states(host)

    run(work)


def test_other_tags_of_a_model_sleep_with_it() -> None:
    async def work() -> None:
        async with ModelHost(2 * MODEL) as host:

            def build() -> Model:
                model = Model(0)
                with cumem.use_memory_pool(host.tag("a", "kv_cache"), on_sleep="discard"):
                    model.cache = make(MIB)
                return model

            host.add("a", build, bytes=2 * MODEL)
            host.add("b", lambda: Model(1), bytes=MODEL)
            async with host.use("a") as model:
                cache = model.cache
            await touch(host, "b")
            assert not cumem.is_mapped(cache)
            assert awake(host) == "b"
            async with host.use("a") as model:
                assert model.is_whole()
                assert cumem.is_mapped(cache)
            assert cumem.epoch(host.tag("a", "kv_cache")) == 1
            del model, cache

    run(work)


def test_a_checkpoint_is_loaded_and_says_the_size(tmp_path: Path) -> None:
    file = tmp_path / "model.safetensors"
    save_file({"weight": torch.arange(WEIGHT // 4, dtype=torch.float32)}, file)

    async def work() -> None:
        async with ModelHost(MODEL) as host:
            host.add("a", lambda: Model(0), file)
            host.add("b", lambda: Model(1), bytes=MODEL)
            for _ in range(2):
                await touch(host, "b")
                async with host.use("a") as model:
                    right = torch.arange(WEIGHT // 4, dtype=torch.float32)
                    assert torch.equal(model.weight.cpu(), right)
                del model
        with pytest.raises(cumem.DeviceOutOfMemoryError, match="the budget is"):
            ModelHost(MODEL // 4).add("a", lambda: Model(0), file)

    run(work)


def test_a_model_that_does_not_fit_leaves_all_as_before(driver: DriverUnderTest) -> None:
    async def work() -> None:
        async with host_of("ab") as host:
            await touch(host, "ab")
            before = driver.used_bytes()
            host.add("large", lambda: [Model(seed) for seed in range(5)])  # size unknown
            wrong = r"'large' does not fit.*took 6\.0 MiB"
            with pytest.raises(cumem.DeviceOutOfMemoryError, match=wrong):
                await touch(host, ["large"])
            assert awake(host) == "ab"
            assert states(host)["large"] is ModelState.NEW
            assert driver.used_bytes() == before
            await touch(host, "ab")

    run(work)


def test_a_build_that_runs_out_of_device_memory_leaves_all_as_before(
    driver: DriverUnderTest,
) -> None:
    async def work() -> None:
        async with host_of("ab") as host:
            await touch(host, "ab")
            before = driver.used_bytes()
            host.add("huge", lambda: [make(200 * MIB) for _ in range(3)])
            wrong = "ran out of device memory"
            with (
                driver.another_tenant(leaves=300 * MIB),
                pytest.raises(cumem.DeviceOutOfMemoryError, match=wrong),
            ):
                await touch(host, ["huge"])
            assert awake(host) == "ab"
            assert driver.used_bytes() == before
            await touch(host, "ab")

    run(work)


def test_an_error_of_build_fn_is_told_and_the_next_use_tries_again() -> None:
    async def work() -> None:
        attempts: list[int] = []

        def build() -> Model:
            model = Model(3)
            attempts.append(len(attempts))
            if len(attempts) == 1:
                raise KeyError("config")
            return model

        async with host_of("b", room=1) as host:
            await touch(host, "b")
            host.add("a", build, bytes=MODEL)
            with pytest.raises(KeyError, match="config"):
                await touch(host, "a")
            assert awake(host) == "b"
            await touch(host, "ab")
            assert host.status().failures == 1

    run(work)


@pytest.mark.parametrize("error", [SystemExit, KeyboardInterrupt, StopIteration])
def test_a_build_fn_that_ends_the_program_ends_its_own_use_only(error: type[BaseException]) -> None:
    async def work() -> None:
        def build() -> Model:
            raise error("no such model")

        async with host_of("b", room=1) as host:
            host.add("a", build, bytes=MODEL)
            for _ in range(2):
                with pytest.raises(RuntimeError, match=f"raised {error.__name__}: no such model"):
                    await touch(host, "a")
            host.prewake("a")  # nobody waits for it; the log is told
            await settled(host)
            await touch(host, "b")
            assert host.status().failures == 3

    run(work)


def test_a_model_outside_of_its_pool_is_refused() -> None:
    async def work() -> None:
        elsewhere = Model(0)
        async with host_of("b") as host:
            host.add("none", lambda: elsewhere)
            host.add("part", lambda: torch.nn.Sequential(Model(1), elsewhere))
            with pytest.raises(ValueError, match="'none' made nothing on the device"):
                await touch(host, ["none"])
            with pytest.raises(ValueError, match=r"1 tensor.*outside of its pools.*1\.weight"):
                await touch(host, ["part"])
            await touch(host, "b")

    run(work)


def test_a_model_larger_than_expected_comes_when_there_is_room() -> None:
    async def work() -> None:
        async def use_two() -> None:
            async with host.use("two") as parts:
                assert all(part.is_whole() for part in parts)
                assert awake(host) == "two"

        async with host_of("a") as host:
            host.add("two", lambda: torch.nn.Sequential(*map(Model, (1, 2, 3))), bytes=MODEL)
            async with host.use("a") as model:
                waiting = asyncio.ensure_future(use_two())
                while host.status().moves < 2:  # it is built beside the other
                    await asyncio.sleep(0.001)
                assert not waiting.done()
                assert model.is_whole()
                assert host.status().mapped_bytes == MODEL
            del model
            await waiting

    run(work)


def test_a_wake_without_memory_is_told_and_loses_nothing(driver: DriverUnderTest) -> None:
    async def work() -> None:
        async with host_of(room=1) as host:
            await touch(host, "ab")
            await asyncio.to_thread(cumem.sleep)
            tenant = driver.another_tenant(leaves=0)
            with tenant, pytest.raises(cumem.DeviceOutOfMemoryError):
                await touch(host, "a")
            await touch(host, "abc")

    run(work)


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


def test_a_model_can_be_removed(driver: DriverUnderTest) -> None:
    async def work() -> None:
        async with host_of() as host:
            before = driver.used_bytes()
            await touch(host, "a")
            async with host.use("a"):
                with pytest.raises(cumem.BusyError, match="'a' is in use"):
                    await host.remove("a")
            await host.remove("a")
            assert driver.used_bytes() == before
            with pytest.raises(ValueError, match="unknown model 'a'"):
                await host.remove("a")
            host.add("a", lambda: Model(8), bytes=MODEL)
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


WRONG_HOSTS: list[tuple[dict[str, Any], str]] = [
    ({"budget_bytes": "4GiB"}, "budget_bytes must be an int, not '4GiB'"),
    ({"budget_bytes": 4e9}, "budget_bytes must be an int, not 4000000000.0"),
    ({"patience": None}, "patience must be an int, not None"),
    ({"busy_seconds": "1"}, "busy_seconds must be a number of seconds, not '1'"),
    ({"busy_seconds": True}, "busy_seconds must be a number of seconds, not True"),
    ({"device": 1.5}, "device must be a torch.device, str or int"),
]

WRONG_MODELS: list[tuple[dict[str, Any], str]] = [
    ({"name": 7}, "name must be a string, not 7"),
    ({"name": ["b"]}, "name must be a string, not a list"),
    ({"build_fn": "build"}, "build_fn must be a function without arguments, not 'build'"),
    ({"checkpoint": 3}, "checkpoint must be a path or None, not 3"),
    ({"bytes": "2MiB"}, "bytes must be an int, not '2MiB'"),
    ({"priority": "high"}, "priority must be an int, not 'high'"),
    ({"pinned": 1}, "pinned must be True or False, not 1"),
]


def test_bad_input_is_an_error_before_anything_changes(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="budget_bytes must be positive"):
        ModelHost(0)
    with pytest.raises(ValueError, match="patience must be positive"):
        ModelHost(1, patience=0)
    with pytest.raises(ValueError, match="no device"):
        ModelHost(1, device=99)
    for options, message in WRONG_HOSTS:
        with pytest.raises(TypeError, match=message):
            ModelHost(**{"budget_bytes": MODEL, **options})
    with pytest.raises(ValueError, match="busy_seconds must be 0 or more"):
        ModelHost(MODEL, busy_seconds=-1)
    host = ModelHost(MODEL)
    host.add("a", lambda: Model(0))
    for options, message in WRONG_MODELS:
        with pytest.raises(TypeError, match=message):
            host.add(**{"name": "b", "build_fn": lambda: Model(0), **options})
    for name in ("", "a", "a/b"):
        with pytest.raises(ValueError, match="a name of its own"):
            host.add(name, lambda: Model(0))
    with pytest.raises(ValueError, match="bytes must be positive"):
        host.add("b", lambda: Model(0), bytes=0)
    with pytest.raises(cumem.CheckpointError):
        host.add("b", lambda: Model(0), tmp_path / "nothing.safetensors")
    assert list(states(host)) == ["a"]


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


def test_contents_that_change_in_use_are_kept() -> None:
    async def work() -> None:
        async with host_of(room=1) as host:
            async with host.use("a") as model:
                model.seed = 77
                fill_pattern(model.weight, 77)
            del model
            await touch(host, "baba")

    run(work)
