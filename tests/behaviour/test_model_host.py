"""Do several models share a device under a budget, each whole whenever it is used?"""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
import torch
from model_host_support import MODEL, WEIGHT, Model, awake, host_of, run, states, touch
from safetensors.torch import save_file
from support import MIB, DriverUnderTest, fill_pattern, make

import cumem
from cumem.serving import ModelHost
from cumem.serving._schedule import ModelState


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


def test_contents_that_change_in_use_are_kept() -> None:
    async def work() -> None:
        async with host_of(room=1) as host:
            async with host.use("a") as model:
                model.seed = 77
                fill_pattern(model.weight, 77)
            del model
            await touch(host, "baba")

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
