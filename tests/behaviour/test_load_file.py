"""Does a checkpoint come to the device whole and once?"""

from __future__ import annotations

import gc
import importlib
import os
from pathlib import Path
from typing import ClassVar

import pytest
import torch
from checkpoints import NAMES, host_tensor, write_file, write_shards
from load_file_support import (
    KIB,
    agree,
    model,
    small_steps,  # noqa: F401 - pytest finds fixtures by name
)
from safetensors.torch import load_file as reference_load
from support import GRANULE, MIB, DriverUnderTest, in_thread, same_bytes, tag_stats

import cumem
from cumem import files


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
    last = {"odd": host_tensor(torch.uint8, (3,), 1), **empty}
    assert agree(cumem.load_file(write_file(tmp_path / "c.safetensors", last)), last)


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


def test_two_threads_may_load_at_once(tmp_path: Path) -> None:
    path = write_file(tmp_path / "model.safetensors", model())
    other = in_thread(lambda: cumem.load_file(path, tag="other"))
    assert agree(cumem.load_file(path), model())
    assert agree(other, model())


@pytest.mark.parametrize("step", ["_fill", "_tensors"])
def test_nobody_puts_it_to_sleep_before_it_is_handed_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: str
) -> None:
    path, original = write_file(tmp_path / "model.safetensors", model()), getattr(files, step)
    cumem.load_file(path)  # the tag is known from now on

    def then_another_sleeps(*arguments: object) -> object:
        result = original(*arguments)
        with pytest.raises(cumem.BusyError):
            in_thread(cumem.sleep)
        return result

    monkeypatch.setattr(files, step, then_another_sleeps)
    assert agree(cumem.load_file(path), model())


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
