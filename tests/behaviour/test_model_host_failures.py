"""What is left when a model cannot be built, does not fit, or finds no memory?"""

from __future__ import annotations

import asyncio

import pytest
import torch
from model_host_support import MODEL, Model, awake, host_of, run, settled, states, touch
from support import MIB, DriverUnderTest, make

import cumem
from cumem.serving._schedule import ModelState


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
