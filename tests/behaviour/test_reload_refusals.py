"""Is a file that has changed, or a refusal of the driver, found before anything is relied on?"""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
from reload_support import (
    digests_are_there,  # noqa: F401 - pytest finds fixtures by name
    intact,
    loaded_fixture,  # noqa: F401 - pytest finds fixtures by name
    path_fixture,  # noqa: F401 - pytest finds fixtures by name
    small_steps,  # noqa: F401 - pytest finds fixtures by name
)
from support import DriverUnderTest, state, tag_stats

import cumem


def touch(path: Path) -> None:
    os.utime(path, ns=(1, 1))


def rewrite(path: Path) -> None:
    with path.open("r+b") as file:
        file.seek(-100, os.SEEK_END)
        file.write(b"other bytes")


def cut(path: Path) -> None:
    os.truncate(path, path.stat().st_size - 1)


def alter_header(path: Path) -> None:
    before = path.stat()
    with path.open("r+b") as file:
        file.seek(12)
        file.write(b"X")
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))


CHANGES = [touch, rewrite, cut, alter_header]


@pytest.mark.parametrize("change", CHANGES)
def test_a_sleep_refuses_a_file_that_has_changed(
    path: Path, loaded: dict[str, torch.Tensor], change: object
) -> None:
    assert cumem.plan_sleep().changed_files == ()
    change(path)  # type: ignore[operator]
    before = state()
    plan = cumem.plan_sleep()
    assert plan.changed_files == (str(path),)
    assert f"a file that has changed: {str(path)!r}" in str(plan)
    assert cumem.plan_sleep(offload_tags=[]).changed_files == ()  # the file is not needed
    with pytest.raises(cumem.CheckpointError, match=r"model\.safetensors.*changed"):
        cumem.sleep()
    assert state() == before
    assert intact(loaded)
    cumem.sleep(offload_tags=[])  # another way does without the file
    cumem.wake_up()


@pytest.mark.parametrize("change", CHANGES)
def test_a_wake_refuses_a_file_that_has_changed_and_can_be_repeated(
    driver: DriverUnderTest, path: Path, loaded: dict[str, torch.Tensor], change: object
) -> None:
    original, times = path.read_bytes(), path.stat()
    used = driver.used_bytes()
    cumem.sleep()
    asleep = driver.used_bytes()
    change(path)  # type: ignore[operator]
    before = state()
    with pytest.raises(cumem.CheckpointError, match=r"model\.safetensors.*changed") as caught:
        cumem.wake_up()
    assert "Put the file back as it was loaded" in str(caught.value)
    assert (state(), driver.used_bytes()) == (before, asleep)
    with path.open("r+b") as file:
        file.write(original)
    os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))
    cumem.wake_up()
    assert driver.used_bytes() == used
    assert intact(loaded)


def test_other_bytes_behind_the_same_identity_are_found_at_wake(
    path: Path, loaded: dict[str, torch.Tensor]
) -> None:
    original, times = path.read_bytes(), path.stat()
    cumem.sleep()
    rewrite(path)
    os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))
    before = state()
    with pytest.raises(cumem.CheckpointError, match=r"model\.safetensors.*changed"):
        cumem.wake_up()
    with pytest.raises(cumem.CheckpointError):
        cumem.wake_up(wait=False).wait()
    assert state() == before
    path.write_bytes(original)
    os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))
    cumem.wake_up()
    assert intact(loaded)


def test_only_loaded_memory_can_be_reloaded() -> None:
    with pytest.raises(ValueError, match="load_file"):
        cumem.use_memory_pool("weights", on_sleep="reload")
    with pytest.raises(ValueError, match="load_file"):
        cumem.graph_pool(on_sleep="reload")


# What the driver refuses


@pytest.mark.parametrize(
    ("call", "nth"),
    [
        *(("cuMemcpyHtoDAsync", nth) for nth in (1, 2, 9)),
        *(("cuEventRecord", nth) for nth in (1, 2, 9)),
        *(("cuEventSynchronize", nth) for nth in (1, 2, 9)),
        *(("cuLaunchKernel", 1), ("cuMemMap", 1)),
    ],
)
@pytest.mark.needs("failures on request")
def test_a_wake_that_is_refused_leaves_it_asleep(
    driver: DriverUnderTest, loaded: dict[str, torch.Tensor], call: str, nth: int
) -> None:
    cumem.sleep()
    before = state()
    driver.emulator.fail(call, nth=nth, code="CUDA_ERROR_UNKNOWN")
    with pytest.raises(cumem.DriverError, match=call):
        cumem.wake_up()
    driver.emulator.clear()
    assert state() == before
    assert driver.used_bytes() == 0
    cumem.check()
    cumem.wake_up()
    assert intact(loaded)


@pytest.mark.parametrize("call", ["cuLaunchKernel", "cuCtxSynchronize", "cuEventSynchronize"])
@pytest.mark.needs("failures on request")
def test_a_sleep_that_is_refused_changes_nothing(
    driver: DriverUnderTest, loaded: dict[str, torch.Tensor], call: str
) -> None:
    before = state()
    driver.emulator.fail(call, code="CUDA_ERROR_UNKNOWN")
    with pytest.raises(cumem.DriverError, match=call):
        cumem.sleep()
    assert state() == before
    assert intact(loaded)
    cumem.sleep()
    cumem.wake_up()
    assert intact(loaded)
    assert tag_stats("weights").segments == 1
