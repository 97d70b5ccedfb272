"""Is whatever is not a whole snapshot of this module refused before anything is written?"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from snapshot_support import Runtime, built
from support import MIB, bytes_of, named_tensors, outside_scopes
from torch import nn

import cumem
from cumem.loading import read_header


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
