"""Does a checkpoint that cannot be loaded leave nothing?"""

from __future__ import annotations

import gc
import os
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from checkpoints import host_tensor, write_file, write_shards
from load_file_support import (
    KIB,
    agree,
    model,
    small_steps,  # noqa: F401 - pytest finds fixtures by name
)
from support import MIB, DriverUnderTest, state

import cumem
from cumem import _dtypes, files


def refused(
    path: Path,
    match: str,
    error: type[Exception] = cumem.CheckpointError,
    arm: Callable[[], object] = lambda: None,
) -> None:
    before = state()
    arm()
    with pytest.raises(error, match=match) as caught:
        cumem.load_file(path)
    assert "Nothing was loaded" in str(caught.value)
    assert state() == before, "while the error is still there"


def test_a_type_that_torch_has_not_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write_file(tmp_path / "model.safetensors", model())
    monkeypatch.delitem(_dtypes._TORCH_NAMES, "BF16")
    with pytest.raises(cumem.CheckpointError, match=r"'BF16'.*'embed'.*Nothing was loaded"):
        cumem.load_file(path)


@pytest.mark.parametrize("cut", [1, 100_000])
def test_a_truncated_file_is_refused(tmp_path: Path, cut: int) -> None:
    path = write_file(tmp_path / "model.safetensors", model())
    os.truncate(path, path.stat().st_size - cut)
    refused(path, "truncated")


def test_a_missing_file_is_refused(tmp_path: Path) -> None:
    refused(tmp_path / "model.safetensors", "cannot be read")


def change_after_header(
    monkeypatch: pytest.MonkeyPatch, change: object, module: object, name: str
) -> None:
    """Something happens to the file between two steps of a load."""
    original = getattr(module, name)

    def changed(*arguments: object) -> object:
        result = original(*arguments)
        change()  # type: ignore[operator]
        return result

    monkeypatch.setattr(module, name, changed)


def test_a_file_that_shrinks_while_it_is_loaded_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write_file(tmp_path / "model.safetensors", model())
    half = path.stat().st_size // 2
    change_after_header(monkeypatch, lambda: os.truncate(path, half), files, "held_file")
    refused(path, r"model\.safetensors.*(changed|cut short)")


def test_a_file_that_is_another_than_its_header_said_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write_file(tmp_path / "model.safetensors", model())
    other = {"other": host_tensor(torch.uint8, (10,), 0)}
    change_after_header(monkeypatch, lambda: write_file(path, other), files, "read_checkpoint")
    refused(path, "changed while it was read")


def test_one_bad_shard_leaves_nothing_of_the_others(tmp_path: Path) -> None:
    folder = write_shards(
        tmp_path,
        {"1.safetensors": model(), "2.safetensors": {"b": host_tensor(torch.int8, (9,), 1)}},
    )
    os.truncate(folder / "2.safetensors", 30)
    refused(folder, "2.safetensors")


@pytest.mark.machine(capacity_bytes=4 * MIB)
@pytest.mark.needs("a small device")
def test_a_full_device_leaves_nothing(driver: DriverUnderTest, tmp_path: Path) -> None:
    tensors = {f"t{seed}": host_tensor(torch.uint8, (3 * MIB,), seed) for seed in range(2)}
    path = write_file(tmp_path / "model.safetensors", tensors)
    refused(path, "cuMemCreate", cumem.DeviceOutOfMemoryError)
    assert driver.used_bytes() == 0


def test_a_host_without_room_leaves_nothing(tmp_path: Path) -> None:
    path = write_file(tmp_path / "model.safetensors", model())
    cumem.configure(cumem.Options(host_limit_bytes=1000))
    refused(path, "host memory", cumem.HostOutOfMemoryError)
    cumem.configure(cumem.Options(host_limit_bytes=128 * KIB))
    assert agree(cumem.load_file(path), model())


@pytest.mark.parametrize("nth", [1, 2])
@pytest.mark.parametrize(
    "call",
    [
        *("cuMemAddressReserve", "cuMemCreate", "cuMemMap", "cuMemSetAccess"),
        *("cuEventCreate", "cuEventRecord", "cuEventSynchronize", "cuMemcpyHtoDAsync"),
        "cuCtxPushCurrent",
    ],
)
@pytest.mark.needs("failures on request")
def test_a_refusal_of_the_driver_leaves_nothing(
    driver: DriverUnderTest, tmp_path: Path, call: str, nth: int
) -> None:
    shards = {"1.safetensors": model(0), "2.safetensors": {"b": host_tensor(torch.int8, (9,), 1)}}
    folder = write_shards(tmp_path, shards)
    cumem.load_file(folder)  # what a device makes once is there
    gc.collect()
    first = 1 if call == "cuCtxPushCurrent" else 0  # asks for captures: unanswered, there is none

    def arm() -> None:
        driver.emulator.fail(call, nth=first + nth, code="CUDA_ERROR_UNKNOWN")

    refused(folder, "CUDA_ERROR_UNKNOWN", cumem.DriverError, arm)
    driver.emulator.clear()
    assert driver.used_bytes() == 0
    assert agree(cumem.load_file(folder), {**shards["1.safetensors"], **shards["2.safetensors"]})


@pytest.mark.parametrize(
    ("settings", "error"),
    [
        ({"tag": ""}, ValueError),
        ({"tag": 5}, TypeError),
        ({"on_sleep": "nap"}, ValueError),
        ({"on_sleep": "disk"}, ValueError),
        ({"device": 77}, ValueError),
    ],
)
def test_bad_arguments_are_refused_first(
    tmp_path: Path, settings: dict[str, object], error: type[Exception]
) -> None:
    with pytest.raises(error):
        cumem.load_file(tmp_path / "is not looked for", **settings)  # type: ignore[arg-type]


@pytest.mark.needs("captures on request")
def test_nothing_is_loaded_during_a_capture(driver: DriverUnderTest, tmp_path: Path) -> None:
    path = write_file(tmp_path / "model.safetensors", model())
    driver.emulator.begin_capture()
    refused(path, "capture", cumem.BusyError)
    driver.emulator.end_capture()
