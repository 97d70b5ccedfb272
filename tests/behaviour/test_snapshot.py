"""Does a snapshot bring a fresh module to the state of another, and refuse whatever is not one?"""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file
from support import (
    GRANULE,
    MIB,
    DriverUnderTest,
    bytes_of,
    fill_pattern,
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
from cumem.loading import read_header

DTYPES = (torch.bfloat16, torch.float64, torch.float8_e4m3fn, torch.float8_e8m0fnu)
DTYPES += (torch.int8, torch.bool, torch.complex64, torch.uint16, torch.float4_e2m1fn_x2)


class Runtime(nn.Module):
    """What loaders leave: ties, other layouts, buffers outside of the state dict, odd types."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(50, 24)
        self.head = nn.Linear(24, 50, bias=False)
        self.head.weight = self.embedding.weight
        self.turned = nn.Parameter(torch.empty(30, 70).t(), requires_grad=False)
        self.last = nn.Conv2d(3, 5, 2).to(memory_format=torch.channels_last)
        self.register_buffer("table", torch.empty(1001, dtype=torch.int32), persistent=False)
        self.register_buffer("row", torch.empty(9).expand(4, 9))
        self.register_buffer("none", torch.empty(3, 0))
        self.register_buffer("scalar", torch.empty((), dtype=torch.int64))
        self.register_buffer("columns", torch.empty(20, 33)[:, 5:17])
        for at, dtype in enumerate(DTYPES):
            self.register_buffer(f"typed{at}", torch.empty(8, dtype=torch.uint8).view(dtype))


def built(seed: int, make: Callable[[], nn.Module] = Runtime) -> nn.Module:
    with cumem.use_memory_pool("weights"), cumem.default_device():
        module = make()
    for at, tensor in enumerate(named_tensors(module).values()):
        write(tensor, seed + at)
    return module


def write(tensor: torch.Tensor, seed: int) -> None:
    """Positions decide the bytes, also where the elements are not row-major."""
    storage = torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(tensor.untyped_storage())
    fill_pattern(storage, seed)
    if tensor.dtype is torch.bool:
        storage.bitwise_and_(1)


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


def test_all_differences_are_said_at_once_and_nothing_is_written(tmp_path: Path) -> None:
    file = tmp_path / "state"
    cumem.save_snapshot(file, built(1), extra={"scales": torch.ones(3), "turn": torch.ones(2)})

    def other() -> nn.Module:
        module = Runtime()
        module.head.weight = nn.Parameter(torch.empty(50, 24))
        module.turned = nn.Parameter(torch.empty(70, 30))
        module.register_buffer("table", torch.empty(1001, dtype=torch.int64))
        module.register_buffer("scalar", torch.empty(1, dtype=torch.int64))
        module.register_buffer("more", torch.empty(1))
        module.register_buffer("turn", torch.empty(2))
        del module.columns
        return module

    fresh = built(7, other)
    before = bytes_of(fresh)
    with pytest.raises(cumem.CheckpointError) as caught:
        cumem.restore_snapshot(file, fresh)
    for part in (
        "it does not fit this Runtime",
        "2 not in the module: columns, scales",
        "1 not in the snapshot: more",
        "1 extra in only one of the two: turn",
        "2 tied differently: embedding.weight, head.weight",
        "1 with other strides: turned ((1, 70) in the snapshot, row-major in the module)",
        "1 of another type: table (I32 in the snapshot, torch.int64 in the module)",
        "1 of another shape: scalar ([] in the snapshot, [1] in the module)",
        "Nothing was loaded",
    ):
        assert part.replace("(1, 70)", str((1, 70))) in str(caught.value)
    assert bytes_of(fresh) == before


def notes(**changes: Any) -> dict[str, str]:
    body = {"version": 2, "module": "Linear", "ties": {}, "strides": {}, "extra": []}
    body |= {"sha256": dict.fromkeys(("weight", "bias"), "0" * 64), **changes}
    return {"cumem_snapshot": json.dumps(body)}


@pytest.mark.parametrize(
    ("metadata", "message"),
    [
        (None, "it is not a snapshot: use load_into"),
        ({"cumem_snapshot": "7"}, "snapshot notes is not a JSON object"),
        (notes(version=3), "its snapshot version is 3, not 1 or 2"),
        (notes(sha256={}), "have not one sha256 for each tensor"),
        (notes(sha256=dict.fromkeys(("weight", "bias"), "0")), "have a sha256 that is none"),
        (notes(ties=3), "not what a snapshot has"),
        (notes(strides={"weight": "x"}), "not what a snapshot has"),
        (notes(ties={"bias": "weight"}), "its notes tie 'bias' to 'weight' wrongly"),
        (notes(ties={"other": "lost"}), "its notes tie 'other' to 'lost' wrongly"),
    ],
)
def test_what_is_no_snapshot_is_refused(
    tmp_path: Path, metadata: dict[str, str] | None, message: str
) -> None:
    module = built(1, lambda: nn.Linear(4, 4))
    before = bytes_of(module)
    tensors = {"weight": torch.ones(4, 4), "bias": torch.ones(4)}
    save_file(tensors, tmp_path / "file", metadata=metadata)
    with pytest.raises(cumem.CheckpointError, match=message):
        cumem.restore_snapshot(tmp_path / "file", module)
    assert bytes_of(module) == before


def flip(file: Path, at: int) -> None:
    """Changes one bit of a file."""
    with file.open("r+b") as stream:
        stream.seek(at)
        byte = stream.read(1)
        stream.seek(at)
        stream.write(bytes([byte[0] ^ 16]))


def test_flipped_byte_of_any_tensor_is_found_before_anything_is_written(tmp_path: Path) -> None:
    file = tmp_path / "state.safetensors"
    cumem.save_snapshot(file, built(1))
    fresh = built(100)
    before = bytes_of(fresh)
    entries = [entry for entry in read_header(file).tensors.values() if entry.bytes]
    assert len(entries) == len(named_tensors(fresh)) - 2  # tied, and without elements
    for entry in entries:
        for at in {entry.begin, (entry.begin + entry.end) // 2, entry.end - 1}:
            flip(file, at)
            with pytest.raises(cumem.CheckpointError) as caught:
                cumem.restore_snapshot(file, fresh)
            told = f"{file}: 1 of {len(entries) + 1} tensor(s) are not what was saved: "
            assert str(caught.value) == f"{told}{entry.name!r}. Nothing was loaded."
            assert bytes_of(fresh) == before, entry.name
            flip(file, at)
    cumem.restore_snapshot(file, fresh)
    assert bytes_of(fresh) == bytes_of(built(1))


def test_all_damaged_tensors_are_named_and_who_does_not_verify_gets_them(tmp_path: Path) -> None:
    """Also where a tensor is longer than what is read at once."""
    file, module = tmp_path / "state", built(1, lambda: nn.Linear(700, 800))
    cumem.save_snapshot(file, module)
    header = read_header(file)
    for name, at in (("weight", 3), ("weight", 2 * MIB), ("bias", 0)):
        flip(file, header.tensors[name].begin + at)
    fresh = built(7, lambda: nn.Linear(700, 800))
    before = bytes_of(fresh)
    with pytest.raises(cumem.CheckpointError, match=r"2 of 2 tensor.*: 'bias', 'weight'"):
        cumem.restore_snapshot(file, fresh)
    assert bytes_of(fresh) == before
    cumem.restore_snapshot(file, fresh, verify=False)
    saved, found = bytes_of(module), bytes_of(fresh)
    assert {name for name in saved if saved[name] != found[name]} == {"weight", "bias"}


def test_snapshot_without_digests_is_restored_with_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """As version 1 wrote it."""
    module = built(1, lambda: nn.Linear(4, 4))
    with outside_scopes():
        tensors = {"weight": torch.arange(16.0).view(4, 4), "bias": torch.arange(4.0)}
    older = notes(version=1)
    body = json.loads(older["cumem_snapshot"])
    del body["sha256"]
    save_file(tensors, tmp_path / "file", metadata={"cumem_snapshot": json.dumps(body)})
    cumem.restore_snapshot(tmp_path / "file", module)
    assert f"{tmp_path / 'file'}: it was saved by a version of cumem without digests" in caplog.text
    with outside_scopes():
        assert all(torch.equal(t.cpu(), tensors[name]) for name, t in module.state_dict().items())
    caplog.clear()
    cumem.restore_snapshot(tmp_path / "file", module, verify=False)
    assert not caplog.records


def test_truncated_or_missing_snapshot_is_refused(tmp_path: Path) -> None:
    module = built(1, lambda: nn.Linear(4, 4))
    file = tmp_path / "state"
    with pytest.raises(cumem.CheckpointError, match="cannot be read"):
        cumem.restore_snapshot(file, module)
    cumem.save_snapshot(file, module)
    os.truncate(file, file.stat().st_size - 1)
    with pytest.raises(cumem.CheckpointError, match="truncated"):
        cumem.restore_snapshot(file, module)


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
