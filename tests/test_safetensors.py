"""Is a faulty checkpoint refused, by its headers alone and with its fault named?"""

from __future__ import annotations

import json
import os
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.torch import save_file

import cumem
from cumem.loading import read_checkpoint, read_header

INDEX = "model.safetensors.index.json"


def tensor(begin: int, end: int, dtype: Any = "U8", shape: Any = None) -> Any:
    shape = [end - begin] if shape is None else shape
    return {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}


def write(path: Path, header: object, payload: int = 8) -> Path:
    """A file with this header (an object, or its text) and a payload of so many bytes."""
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + bytes(range(payload)))
    return path


GOOD = {"a": tensor(0, 4), "b": tensor(4, 8)}

FAULTY_HEADERS: dict[str, tuple[object, str]] = {
    "not json": (b"{'a': 1}", "not valid JSON"),
    "not utf-8": (b'{"\xff": 1}', "not valid JSON"),
    "not an object": (b"[1, 2]", "not a JSON object"),
    "nested too deeply": (b"[" * 100_000, "not valid JSON"),
    "a number of too many digits": (b'{"a": ' + b"9" * 10_000 + b"}", "not valid JSON"),
    "a duplicate name": (b'{"a": {}, "a": {}}', "the name 'a' is in its header twice"),
    "a duplicate field": (b'{"a": {"dtype": "U8", "dtype": "I8"}}', "the name 'dtype'"),
    "metadata not of strings": ({"__metadata__": {"a": 1}, **GOOD}, "not a map of strings"),
    "a tensor without fields": ({"a": {}}, "tensor 'a' needs dtype, shape and data_offsets"),
    "a tensor that is a number": ({"a": 3}, "tensor 'a' needs"),
    "an unknown dtype": ({"a": tensor(0, 8, "F7")}, "unknown dtype 'F7'; known: 'BF16', 'BOOL'"),
    "a dtype that is no string": ({"a": tensor(0, 8, ["U8"])}, "unknown dtype"),
    "a negative length": ({"a": tensor(0, 8, shape=[-8])}, "impossible shape"),
    "a length that is true": ({"a": tensor(0, 1, shape=[True])}, "impossible shape"),
    "a fractional length": ({"a": tensor(0, 8, shape=[8.0])}, "impossible shape"),
    "a shape that is a number": ({"a": tensor(0, 8, shape=8)}, "impossible shape"),
    "offsets in reverse": ({"a": tensor(8, 0, shape=[8])}, "impossible offsets"),
    "three offsets": ({"a": {**tensor(0, 8), "data_offsets": [0, 4, 8]}}, "impossible offsets"),
    "huge offsets": ({"a": {**tensor(0, 8), "data_offsets": [0, 10**4000]}}, "impossible offsets"),
    "a size that does not fit": ({"a": tensor(0, 8, "F32", [3])}, "8 bytes, not what F32 of shape"),
    "a size beyond any file": ({"a": tensor(0, 8, "U8", [2**62] * 9)}, "8 bytes, not what"),
    "lengths beyond any tensor": ({"a": tensor(0, 0, "U8", [0, 2**62, 2])}, "0 bytes, not what"),
    "half a byte": ({"a": tensor(0, 1, "F4", [1])}, "1 bytes, not what F4"),
    "rows that end in half a byte": (
        {"a": tensor(0, 3, "F4", [2, 3])},
        "rows of F4 end in half a byte",
    ),
    "an overlap": ({"a": tensor(0, 6), "b": tensor(4, 8)}, "tensor 'b' overlaps tensor 'a'"),
    "a gap": ({"a": tensor(0, 3), "b": tensor(4, 8)}, "a gap of 1 bytes before tensor 'b'"),
    "a gap at the start": ({"a": tensor(2, 8)}, "a gap of 2 bytes before tensor 'a'"),
    "an end beyond the file": ({"a": tensor(0, 9)}, "truncated: tensor 'a' ends at byte"),
    "bytes that no tensor has": ({"a": tensor(0, 7)}, "1 bytes follow its last tensor"),
}


@pytest.mark.parametrize("kind", FAULTY_HEADERS)
def test_faulty_header_is_refused_and_named(tmp_path: Path, kind: str) -> None:
    header, message = FAULTY_HEADERS[kind]
    file = write(tmp_path / "model.safetensors", header)
    with pytest.raises(cumem.CheckpointError) as caught:
        read_header(file)
    assert str(caught.value).startswith(f"{file}: ")
    assert message in str(caught.value)
    assert len(str(caught.value)) < 1000


def truncate(file: Path, size: int) -> None:
    os.truncate(file, size)


FAULTY_FILES: dict[str, tuple[Callable[[Path], object], str]] = {
    "an empty file": (lambda file: file.write_bytes(b""), "at least 8 bytes, this one has 0"),
    "seven bytes": (lambda file: file.write_bytes(b"\0" * 7), "at least 8 bytes"),
    "a header longer than the file": (lambda file: truncate(file, 20), "the file has 20"),
    "a cut payload": (
        lambda file: truncate(file, file.stat().st_size - 3),
        "it is truncated: tensor 'b' ends at byte",
    ),
    "an appended payload": (
        lambda file: truncate(file, file.stat().st_size + 3),
        "3 bytes follow its last tensor",
    ),
    "a header above 100 MB": (
        lambda file: (file.write_bytes(struct.pack("<Q", 100_000_001)), truncate(file, 1 << 28)),
        "100000001 bytes, more than the allowed 100 MB",
    ),
    "a header of 2^64 bytes": (
        lambda file: file.write_bytes(b"\xff" * 64),
        "is no safetensors file",
    ),
    "a missing file": (Path.unlink, "No such file"),
    "a pipe": (lambda file: (file.unlink(), os.mkfifo(file)), "not a regular file"),
}


@pytest.mark.parametrize("kind", FAULTY_FILES)
@pytest.mark.timeout(20)
def test_faulty_file_is_refused_and_named(tmp_path: Path, kind: str) -> None:
    damage, message = FAULTY_FILES[kind]
    file = write(tmp_path / "model.safetensors", GOOD)
    read_header(file)
    damage(file)
    with pytest.raises(cumem.CheckpointError, match="Nothing was loaded") as caught:
        read_checkpoint(file)
    assert str(file) in str(caught.value)
    assert message in str(caught.value)


@pytest.mark.parametrize("name", ["a\0b", "a\ud800b", "a" * 5000])
def test_path_that_no_file_can_have_is_refused(tmp_path: Path, name: str) -> None:
    with pytest.raises(cumem.CheckpointError, match=r"it cannot be read.*Nothing was loaded"):
        read_checkpoint(tmp_path / name)


@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    changes=st.lists(st.tuples(st.integers(0, 300), st.integers(0, 255)), max_size=3),
    cut=st.integers(0, 12),
)
def test_damaged_file_is_refused_or_read_alike_by_the_library(
    tmp_path_factory: pytest.TempPathFactory, changes: list[tuple[int, int]], cut: int
) -> None:
    file = tmp_path_factory.getbasetemp() / "damaged.safetensors"
    contents = bytearray(write(file, {"__metadata__": {"k": "v"}, **GOOD}).read_bytes())
    for at, value in changes:
        contents[at % len(contents)] = value
    file.write_bytes(contents[: len(contents) - cut])
    try:
        header = read_header(file)
    except cumem.CheckpointError:
        return
    with safe_open(file, framework="pt") as library:
        assert set(library.keys()) == set(header.tensors)
        for name, entry in header.tensors.items():
            assert list(library.get_slice(name).get_shape()) == list(entry.shape)


def test_header_of_a_good_file_says_where_the_bytes_are(tmp_path: Path) -> None:
    numbers = torch.arange(12, dtype=torch.int16).view(3, 4)
    scalar, empty = torch.tensor(1.5), torch.empty(0, 7, dtype=torch.float64)
    file = tmp_path / "any.safetensors"
    save_file({"n": numbers, "s": scalar, "e": empty}, file, metadata={"format": "pt"})
    header = read_header(file)
    entry = header.tensors["n"]
    assert (entry.dtype, entry.shape, entry.bytes) == ("I16", (3, 4), 24)
    assert file.read_bytes()[entry.begin : entry.end] == bytes(numbers.untyped_storage())
    assert header.metadata == {"format": "pt"}
    assert header.tensors["s"].shape == ()
    assert header.tensors["e"].bytes == 0
    assert header.tensor_bytes == 28


def test_file_without_tensors_is_good(tmp_path: Path) -> None:
    assert read_header(write(tmp_path / "none.safetensors", {}, payload=0)).tensors == {}


# Folders


def shards(folder: Path, places: object = None) -> None:
    write(folder / "1.safetensors", {"a": tensor(0, 8)})
    write(folder / "2.safetensors", {"b": tensor(0, 8)})
    places = {"a": "1.safetensors", "b": "2.safetensors"} if places is None else places
    (folder / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": places}))


def test_sharded_folder_is_read_whole(tmp_path: Path) -> None:
    shards(tmp_path)
    write(tmp_path / "other.safetensors", {"c": tensor(0, 8)})  # not in the index
    checkpoint = read_checkpoint(tmp_path)
    assert list(checkpoint.tensors) == ["a", "b"]
    assert checkpoint.tensor_bytes == 16


@pytest.mark.parametrize(
    ("places", "message"),
    [
        ({"a": "1.safetensors", "b": "3.safetensors"}, "3.safetensors: it cannot be read"),
        ({"a": "1.safetensors", "b": "1.safetensors"}, "tensor 'b' is not in '1.safetensors'"),
        ({"a": "1.safetensors", "x": "2.safetensors"}, "tensor 'x' is not in '2.safetensors'"),
        ({"a": "../1.safetensors"}, "not a file name"),
        ({"a": "/etc/passwd"}, "not a file name"),
        ({"a": "1\0"}, "not a file name"),
        ({"a": 1}, "not a file name"),
        ({"a": "\ud800"}, "it cannot be read"),
        ({}, "it has no weight_map"),
        ([], "it has no weight_map"),
    ],
)
def test_faulty_index_is_refused(tmp_path: Path, places: object, message: str) -> None:
    shards(tmp_path, places)
    with pytest.raises(cumem.CheckpointError) as caught:
        read_checkpoint(tmp_path)
    assert message in str(caught.value)


def test_tensor_that_two_shards_hold_is_refused(tmp_path: Path) -> None:
    shards(tmp_path)
    write(tmp_path / "2.safetensors", GOOD)
    with pytest.raises(cumem.CheckpointError, match="does not say that tensor 'a' is in '2"):
        read_checkpoint(tmp_path)


@pytest.mark.parametrize("text", [b"", b"[]", b"\xff", b'{"weight_map": {}, "weight_map": {}}'])
def test_index_that_is_no_index_is_refused(tmp_path: Path, text: bytes) -> None:
    (tmp_path / INDEX).write_bytes(text)
    with pytest.raises(cumem.CheckpointError, match=INDEX):
        read_checkpoint(tmp_path)


@pytest.mark.timeout(20)
@pytest.mark.parametrize(
    ("make", "message"),
    [
        (os.mkfifo, "not a regular file"),
        (os.mkdir, "not a regular file"),
        (lambda index: (index.touch(), os.truncate(index, 1 << 40)), "at most 100 MB"),
    ],
)
def test_index_that_is_no_such_file_is_refused(
    tmp_path: Path, make: Callable[[Path], object], message: str
) -> None:
    make(tmp_path / INDEX)
    with pytest.raises(cumem.CheckpointError, match=f"{INDEX}.*{message}"):
        read_checkpoint(tmp_path)


def test_folder_without_safetensors_is_refused_and_pickle_is_not_touched(tmp_path: Path) -> None:
    (tmp_path / "pytorch_model.bin").write_bytes(b"cos\nsystem\n(S'false'\ntR.")
    with pytest.raises(cumem.CheckpointError, match="no safetensors file in it"):
        read_checkpoint(tmp_path)


def test_folder_of_several_files_without_an_index_is_refused(tmp_path: Path) -> None:
    shards(tmp_path)
    (tmp_path / INDEX).unlink()
    with pytest.raises(
        cumem.CheckpointError, match=r"several .*: '1.safetensors', '2.safetensors'"
    ):
        read_checkpoint(tmp_path)
    write(tmp_path / "model.safetensors", GOOD)
    assert list(read_checkpoint(tmp_path).tensors) == ["a", "b"]


def test_half_a_checkpoint_is_not_taken_for_a_whole_one(tmp_path: Path) -> None:
    write(tmp_path / "model-00001-of-00002.safetensors", GOOD)
    with pytest.raises(cumem.CheckpointError, match="is one of several files"):
        read_checkpoint(tmp_path)
    (tmp_path / INDEX).symlink_to("not downloaded yet")
    with pytest.raises(cumem.CheckpointError, match=f"{INDEX}: it cannot be read"):
        read_checkpoint(tmp_path)


def test_only_file_of_one_is_a_whole_checkpoint(tmp_path: Path) -> None:
    write(tmp_path / "model-00001-of-00001.safetensors", GOOD)
    assert list(read_checkpoint(tmp_path).tensors) == ["a", "b"]
