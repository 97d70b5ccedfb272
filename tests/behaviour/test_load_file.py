"""Does a checkpoint come to the device whole, once, and leave nothing when it cannot?"""

from __future__ import annotations

import gc
import importlib
import os
from collections.abc import Callable
from pathlib import Path
from typing import ClassVar

import pytest
import torch
from checkpoints import NAMES, host_tensor, write_file, write_shards
from safetensors.torch import load_file as reference_load
from support import GRANULE, MIB, DriverUnderTest, in_thread, same_bytes, state, tag_stats

import cumem
from cumem import _dtypes, files

KIB = 1 << 10


@pytest.fixture(autouse=True)
def small_steps() -> None:
    """Buffers so small that a test's files take many of them."""
    cumem.configure(
        cumem.Options(load_buffer_bytes=64 * KIB, load_ring_bytes=512 * KIB, load_threads=3)
    )


def model(seed: int = 0) -> dict[str, torch.Tensor]:
    return {
        "embed": host_tensor(torch.bfloat16, (1000, 96), seed),
        "layer.weight": host_tensor(torch.float32, (301, 127), seed + 1),
        "layer.bias": host_tensor(torch.float32, (127,), seed + 2),
        "steps": host_tensor(torch.int64, (), seed + 3),
    }


def agree(loaded: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> bool:
    return list(loaded) == list(expected) and all(
        loaded[name].dtype == tensor.dtype
        and loaded[name].shape == tensor.shape
        and same_bytes(loaded[name], tensor)
        for name, tensor in expected.items()
    )


def test_a_file_comes_as_one_segment_of_its_own_bytes(
    driver: DriverUnderTest, tmp_path: Path
) -> None:
    tensors = model()
    path = write_file(tmp_path / "model.safetensors", tensors)
    before = driver.used_bytes()
    loaded = cumem.load_file(path)
    payload = sum(tensor.nbytes for tensor in tensors.values())
    assert agree(loaded, tensors)
    stats = tag_stats("weights")
    assert stats.segments == 1
    assert payload <= stats.live_bytes < payload + 16 * len(tensors)
    assert driver.used_bytes() - before == stats.segment_bytes < payload + GRANULE + 64
    assert all(cumem.tag_of(tensor) == "weights" for tensor in loaded.values())
    assert all(tensor.data_ptr() % 16 == 0 for tensor in loaded.values())
    assert loaded["embed"].device.type == driver.device.type


def test_it_is_what_the_formats_own_library_reads(tmp_path: Path) -> None:
    path = write_file(tmp_path / "model.safetensors", model())
    expected = reference_load(path)
    loaded = cumem.load_file(str(path))
    assert loaded.keys() == expected.keys()
    assert all(same_bytes(loaded[name], tensor) for name, tensor in expected.items())


@pytest.mark.parametrize("dtype", NAMES, ids=lambda dtype: str(dtype).removeprefix("torch."))
@pytest.mark.parametrize("padding", [0, 1, 6])
def test_every_type_is_read_wherever_its_bytes_lie(
    tmp_path: Path, dtype: torch.dtype, padding: int
) -> None:
    tensors = {
        "odd": host_tensor(torch.uint8, (3,), 1),
        "it": host_tensor(dtype, (5, 7), 2),
        "odd too": host_tensor(torch.uint8, (1,), 3),
        "again": host_tensor(dtype, (11,), 4),
    }
    path = write_file(tmp_path / "model.safetensors", tensors, padding=padding)
    loaded = cumem.load_file(path)
    assert agree(loaded, tensors)
    assert all(tensor.data_ptr() % 16 == 0 for tensor in loaded.values())


def test_pairs_of_four_bit_floats_are_read(tmp_path: Path) -> None:
    kind = getattr(torch, "float4_e2m1fn_x2", None)
    if kind is None:
        pytest.skip("this torch has no 4-bit floats")
    pairs = host_tensor(torch.uint8, (4, 8), 1)
    path = write_file(tmp_path / "model.safetensors", {"pairs": pairs})
    text = path.read_bytes()
    path.write_bytes(text.replace(b'"U8", "shape": [4, 8]', b'"F4", "shape": [4,16]'))
    (tensor,) = cumem.load_file(path).values()
    assert (tensor.dtype, tuple(tensor.shape)) == (kind, (4, 8))
    assert same_bytes(tensor.view(torch.uint8), pairs)


def test_a_type_that_torch_has_not_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write_file(tmp_path / "model.safetensors", model())
    monkeypatch.delitem(_dtypes._TORCH_NAMES, "BF16")
    with pytest.raises(cumem.CheckpointError, match=r"'BF16'.*'embed'.*Nothing was loaded"):
        cumem.load_file(path)


def test_empty_tensors_and_empty_files_need_no_memory(
    driver: DriverUnderTest, tmp_path: Path
) -> None:
    empty = {"none": host_tensor(torch.float32, (0, 4), 0)}
    before = driver.used_bytes()
    loaded = cumem.load_file(write_file(tmp_path / "a.safetensors", empty))
    assert (loaded["none"].shape, driver.used_bytes()) == ((0, 4), before)
    assert cumem.load_file(write_file(tmp_path / "b.safetensors", {})) == {}
    mixed = {**empty, **model()}
    assert agree(cumem.load_file(write_file(tmp_path / "c.safetensors", mixed)), mixed)


def test_shards_come_as_a_segment_each(tmp_path: Path) -> None:
    first, second = model(0), {f"more.{name}": tensor for name, tensor in model(10).items()}
    folder = write_shards(tmp_path, {"1.safetensors": first, "2.safetensors": second})
    loaded = cumem.load_file(folder, tag="shards")
    assert agree(loaded, {**first, **second})
    assert tag_stats("shards").segments == 2


def test_a_folder_with_one_file_is_that_file(tmp_path: Path) -> None:
    write_file(tmp_path / "model.safetensors", model())
    assert agree(cumem.load_file(tmp_path), model())


@pytest.mark.machine(devices=2)
def test_it_comes_to_the_device_that_is_named(tmp_path: Path, driver: DriverUnderTest) -> None:
    path = write_file(tmp_path / "model.safetensors", model())
    before = driver.used_bytes(1)
    loaded = cumem.load_file(path, device=1)
    assert driver.used_bytes(1) - before == tag_stats("weights").segment_bytes
    assert agree(loaded, model())


@pytest.mark.parametrize("policy", ["offload", "discard", "keep"])
def test_it_sleeps_as_its_policy_says(tmp_path: Path, policy: str) -> None:
    path = write_file(tmp_path / "model.safetensors", model())
    loaded = cumem.load_file(path, on_sleep=policy)
    path.unlink()
    report = cumem.sleep()
    assert report.reload_bytes == 0
    woken = cumem.wake_up(fill="zero")
    if policy == "discard":
        assert woken.undefined == {"weights"}
        assert not any(tensor.any() for tensor in loaded.values())
    else:
        assert agree(loaded, model())


def test_the_segment_goes_with_the_last_tensor(driver: DriverUnderTest, tmp_path: Path) -> None:
    loaded = cumem.load_file(write_file(tmp_path / "model.safetensors", model()))
    last = loaded["layer.bias"]
    loaded.clear()
    gc.collect()
    assert tag_stats("weights").segments == 1
    del last
    gc.collect()
    assert tag_stats("weights").segments == 0


def test_no_file_stays_open(tmp_path: Path) -> None:
    path = write_file(tmp_path / "model.safetensors", model())
    loaded = cumem.load_file(path)
    names = [os.path.realpath(entry.path) for entry in os.scandir("/proc/self/fd")]
    assert str(path) not in names
    assert loaded


def test_host_memory_is_bounded_by_the_ring(tmp_path: Path) -> None:
    tensors = {"big": host_tensor(torch.uint8, (7 * MIB,), 1)}
    loaded = cumem.load_file(write_file(tmp_path / "model.safetensors", tensors))
    assert 0 < cumem.stats().host_bytes <= 512 * KIB
    assert cumem.stats().host_used_bytes == 0
    assert agree(loaded, tensors)


@pytest.mark.parametrize("threads", [1, 2, 7])
def test_any_number_of_threads_reads_the_same(tmp_path: Path, threads: int) -> None:
    tensors = {f"t{seed}": host_tensor(torch.uint8, (777_777,), seed) for seed in range(3)}
    path = write_file(tmp_path / "model.safetensors", tensors, padding=3)
    cumem.configure(
        cumem.Options(load_threads=threads, load_buffer_bytes=4096, load_ring_bytes=32 * KIB)
    )
    assert agree(cumem.load_file(path), tensors)


@pytest.mark.needs("a driver that refuses to pin")
def test_memory_that_cannot_be_pinned_will_do(driver: DriverUnderTest, tmp_path: Path) -> None:
    driver.emulator.refuse_pinning()
    assert agree(cumem.load_file(write_file(tmp_path / "model.safetensors", model())), model())
    driver.emulator.refuse_pinning(False)


# What cannot be loaded


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


def test_two_threads_may_load_at_once(tmp_path: Path) -> None:
    path = write_file(tmp_path / "model.safetensors", model())
    other = in_thread(lambda: cumem.load_file(path, tag="other"))
    assert agree(cumem.load_file(path), model())
    assert agree(other, model())


# Progress


class Bar:
    """Stands in for tqdm's."""

    made: ClassVar[list[Bar]] = []

    def __init__(self, *, total: int, **settings: object) -> None:
        self.total, self.settings, self.n, self.disable = total, settings, 0, False
        Bar.made.append(self)

    def update(self, step: int) -> None:
        self.n += step

    def __enter__(self) -> Bar:
        return self

    def __exit__(self, *error: object) -> None: ...


def test_progress_is_shown_to_the_end_and_only_on_a_terminal(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Module:
        tqdm = Bar

    original = importlib.import_module
    monkeypatch.setattr(
        importlib, "import_module", lambda name: Module if name == "tqdm" else original(name)
    )
    path = write_file(tmp_path / "model.safetensors", model())
    loaded = cumem.load_file(path)
    (bar,) = Bar.made
    assert bar.settings["disable"] is None  # asks whether it is a terminal
    assert bar.n == sum(tensor.nbytes for tensor in loaded.values())


def test_without_tqdm_there_is_no_bar(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    original = importlib.import_module

    def missing(name: str) -> object:
        if name == "tqdm":
            raise ImportError(name)
        return original(name)

    monkeypatch.setattr(importlib, "import_module", missing)
    path = write_file(tmp_path / "model.safetensors", model())
    assert agree(cumem.load_file(path), model())
