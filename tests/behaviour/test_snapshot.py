"""Does a snapshot bring a fresh module to the state of another, and fail without a trace?"""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from snapshot_support import built
from support import (
    GRANULE,
    MIB,
    DriverUnderTest,
    bytes_of,
    named_tensors,
    outside_scopes,
    pattern,
    pointers,
    raw,
    run_fresh,
    state,
)
from torch import nn

import cumem
from cumem import _private_file


@pytest.mark.parametrize("staging", [4096, 32 * MIB])
def test_fresh_module_is_brought_to_the_same_state(tmp_path: Path, staging: int) -> None:
    cumem.configure(cumem.Options(staging_bytes=staging))
    file = tmp_path / "state.safetensors"
    module, scales = built(1), torch.arange(5000.0, device=cumem.default_device())
    expected = bytes_of(module)
    before = state()
    saved = cumem.save_snapshot(file, module, extra={"scales": scales})
    assert state() == before
    assert saved.tensors == len(named_tensors(module)) - 1 + 1
    fresh, fresh_scales = built(100), torch.zeros_like(scales)
    assert bytes_of(fresh) != expected
    addresses, before = pointers(fresh), state()
    restored = cumem.restore_snapshot(file, fresh, extra={"scales": fresh_scales})
    assert (restored.tensors, restored.bytes) == (saved.tensors, saved.bytes)
    assert bytes_of(fresh) == expected
    assert torch.equal(fresh_scales, scales)
    assert pointers(fresh) == addresses
    assert state() == before
    assert fresh.head.weight is fresh.embedding.weight


class Windows(nn.Module):
    """Buffers that lie in one another, at one address too, and that cross."""

    def __init__(self) -> None:
        super().__init__()
        memory = torch.empty(1000)
        for name, start, stop in (("all", 0, 600), ("head", 0, 10), ("middle", 200, 300)):
            self.register_buffer(name, memory[start:stop])
        self.register_buffer("past", memory[500:1000])


def test_buffers_that_share_memory_come_back_whole(tmp_path: Path) -> None:
    module, fresh = built(1, Windows), built(100, Windows)
    cumem.save_snapshot(tmp_path / "state", module)
    cumem.restore_snapshot(tmp_path / "state", fresh)
    assert bytes_of(fresh) == bytes_of(module)


def test_file_is_private_and_any_reader_of_the_format_reads_it(tmp_path: Path) -> None:
    file = tmp_path / "state.safetensors"
    file.write_text("an older one")
    file.chmod(0o644)
    module = built(3)
    cumem.save_snapshot(str(file), module)
    assert file.stat().st_mode & 0o777 == 0o600
    assert os.listdir(tmp_path) == [file.name]
    with safe_open(file, framework="pt") as reader:
        names = set(reader.keys())
        assert names == named_tensors(module).keys() - {"head.weight"}
        for name, tensor in named_tensors(module).items():
            if name in names and tensor.dtype is not torch.float4_e2m1fn_x2:
                read = reader.get_tensor(name)
                with outside_scopes():
                    same = torch.equal(raw(read), raw(tensor.cpu().contiguous()))
                assert (read.dtype, read.shape, same) == (tensor.dtype, tensor.shape, True), name


def test_snapshot_comes_back_in_a_fresh_process(tmp_path: Path, driver: DriverUnderTest) -> None:
    if not driver.emulated:
        pytest.skip("the process is one of the emulator's")
    module = built(5, lambda: nn.Linear(100, 300, dtype=torch.bfloat16))
    expected = pattern(100 * 300 * 2, 5)
    cumem.save_snapshot(tmp_path / "state", module)
    run_fresh(
        "import torch, cumem\n"
        "with cumem.use_memory_pool('weights'):\n"
        "    module = torch.nn.Linear(100, 300, dtype=torch.bfloat16)\n"
        f"cumem.restore_snapshot({str(tmp_path / 'state')!r}, module)\n"
        "found = module.weight.detach().view(-1).view(torch.uint8).tolist()\n"
        f"torch.save(torch.tensor(found, dtype=torch.uint8), {str(tmp_path / 'found')!r})\n"
        "cumem.sleep(); cumem.wake_up()\n"
    )
    assert torch.equal(torch.load(tmp_path / "found"), expected)


def test_host_memory_is_bounded_while_it_is_saved(
    tmp_path: Path, driver: DriverUnderTest, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = built(2, lambda: nn.ParameterList([torch.empty(600, 1000).t(), torch.empty(900_000)]))
    before, parts, taken, real = driver.used_bytes(), [], [], os.write

    def watched(descriptor: int, data: memoryview) -> int:
        parts.append(len(data))
        taken.append(driver.used_bytes() - before)
        return real(descriptor, data)

    monkeypatch.setattr(os, "write", watched)
    cumem.configure(cumem.Options(staging_bytes=100_000))
    cumem.save_snapshot(tmp_path / "state", module)
    assert len(parts) > 60
    assert max(parts) <= 100_000
    assert max(taken) == GRANULE
    assert driver.used_bytes() == before


@pytest.mark.parametrize("call", ["posix_fallocate", "write", "pwrite", "fsync", "replace"])
def test_full_directory_leaves_the_older_snapshot_and_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    module, file = built(1, lambda: nn.Linear(40, 40)), tmp_path / "state"
    cumem.save_snapshot(file, module)
    older, expected = file.read_bytes(), bytes_of(module)
    calls = []

    def refuse(*arguments: object) -> None:
        calls.append(os.listdir(tmp_path))
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(_private_file.os, call, refuse)
        with pytest.raises(cumem.CheckpointError, match=r"KiB cannot be written \(No space left"):
            cumem.save_snapshot(file, module)
    assert [len(names) for names in calls] == [2]
    assert os.listdir(tmp_path) == ["state"]
    assert file.read_bytes() == older
    assert bytes_of(module) == expected


@pytest.mark.parametrize("code", [errno.EIO, errno.EINVAL])
def test_folder_that_cannot_be_synced_is_not_said_to_hold_the_older_snapshot(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    module, file = built(1, lambda: nn.Linear(4, 4)), tmp_path / "state"
    cumem.save_snapshot(file, built(100, lambda: nn.Linear(4, 4)))
    real = os.fsync

    def refuse_folders(descriptor: int) -> None:
        if stat.S_ISDIR(os.fstat(descriptor).st_mode):
            raise OSError(code, os.strerror(code))
        real(descriptor)

    with monkeypatch.context() as patch:
        patch.setattr(_private_file.os, "fsync", refuse_folders)
        if code == errno.EINVAL:  # a file system whose folders cannot be synced
            cumem.save_snapshot(file, module)
        else:
            with pytest.raises(cumem.CheckpointError, match="The new file is in its place"):
                cumem.save_snapshot(file, module)
    assert os.listdir(tmp_path) == ["state"]
    fresh = built(100, lambda: nn.Linear(4, 4))
    cumem.restore_snapshot(file, fresh)
    assert bytes_of(fresh) == bytes_of(module)


def test_place_that_cannot_be_written_is_an_error(tmp_path: Path) -> None:
    module = built(1, lambda: nn.Linear(4, 4))
    (tmp_path / "folder").mkdir()
    for place in (tmp_path / "none" / "state", tmp_path / "folder"):
        with pytest.raises(cumem.CheckpointError, match="cannot be written"):
            cumem.save_snapshot(place, module)
    assert os.listdir(tmp_path) == ["folder"]


def test_tensors_that_no_file_holds_are_all_named(tmp_path: Path) -> None:
    module = built(1, lambda: nn.Linear(4, 4))
    module.register_buffer("wide", torch.ones(2, dtype=torch.complex128))
    module.register_buffer("thin", torch.ones(2, 2).to_sparse())
    module.register_buffer("void", torch.ones(2, device="meta"))
    with pytest.raises(cumem.CheckpointError, match=r"3 tensor.*: wide .*, thin .*, void"):
        cumem.save_snapshot(tmp_path / "state", module)
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("name", ["__metadata__", "half a pair \ud800"])
def test_name_that_no_file_holds_leaves_the_older_snapshot(tmp_path: Path, name: str) -> None:
    module = built(1, lambda: nn.Linear(4, 4))
    cumem.save_snapshot(tmp_path / "state", module)
    older = (tmp_path / "state").read_bytes()
    with pytest.raises(cumem.CheckpointError, match=r"1 tensor.* cannot be in a safetensors file"):
        cumem.save_snapshot(tmp_path / "state", module, extra={name: torch.ones(1)})
    assert (tmp_path / "state").read_bytes() == older


def test_wrong_arguments_change_nothing(tmp_path: Path) -> None:
    module = built(1, lambda: nn.Linear(4, 4))
    with pytest.raises(TypeError, match="expected a module, not str"):
        cumem.save_snapshot(tmp_path / "state", "module")
    with pytest.raises(TypeError, match="extra must be tensors by name; 'more' is int"):
        cumem.save_snapshot(tmp_path / "state", module, extra={"more": 3})
    with pytest.raises(ValueError, match="extra has names of the module: weight"):
        cumem.save_snapshot(tmp_path / "state", module, extra={"weight": torch.ones(1)})
    with pytest.raises(TypeError, match="verify"):
        cumem.restore_snapshot(tmp_path / "state", module, verify="no")
    assert os.listdir(tmp_path) == []


def test_sleeping_module_is_neither_saved_nor_restored(tmp_path: Path) -> None:
    module = built(1, lambda: nn.Linear(4, 4))
    expected = bytes_of(module)
    cumem.save_snapshot(tmp_path / "state", module)
    cumem.sleep()
    for call in (cumem.save_snapshot, cumem.restore_snapshot):
        with pytest.raises(cumem.AsleepError, match=r"2 tensor.s. are asleep: .*bias"):
            call(tmp_path / "state", module)
    cumem.wake_up()
    assert bytes_of(module) == expected


def test_tag_is_not_put_to_sleep_while_it_is_saved(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    module, real, refused = built(1, lambda: nn.Linear(4, 4)), os.write, []

    def sleeping(*arguments: Any) -> int:
        with pytest.raises(cumem.BusyError) as caught:
            cumem.sleep()
        refused.append(caught.value)
        return real(*arguments)

    monkeypatch.setattr(_private_file.os, "write", sleeping)
    cumem.save_snapshot(tmp_path / "state", module)
    assert refused
    assert cumem.sleep().offloaded_bytes > 0
    cumem.wake_up()
