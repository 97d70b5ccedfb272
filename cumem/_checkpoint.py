"""Which files make up a checkpoint, and which tensor is in which of them?"""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from cumem._safetensors import (
    MOST_HEADER_BYTES,
    Header,
    TensorEntry,
    brief,
    fault,
    parse_object,
    read_header,
    reason_of,
)
from cumem._text import choices

INDEX_NAME = "model.safetensors.index.json"
_USUAL_NAME = "model.safetensors"
_OF_SEVERAL = re.compile(r"-\d+-of-(\d{1,9})\.safetensors$")


@dataclass(frozen=True)
class Checkpoint:
    """The files that hold a model, one or several; no tensor is in two of them."""

    path: Path
    files: tuple[Header, ...]
    tensors: Mapping[str, TensorEntry] = field(init=False)

    def __post_init__(self) -> None:
        merged = {name: entry for file in self.files for name, entry in file.tensors.items()}
        object.__setattr__(self, "tensors", merged)

    @property
    def tensor_bytes(self) -> int:
        return sum(file.tensor_bytes for file in self.files)


def read_checkpoint(path: str | Path) -> Checkpoint:
    """Reads and judges the headers of a model: one file, or a folder of them.

    In a folder the index ``model.safetensors.index.json`` says which files belong to
    the model; without one it is ``model.safetensors``, or the only file there is, unless
    its name says that it is one of several.

    Raises:
        CheckpointError: no checkpoint there, or one that is not whole.
    """
    place = Path(path)
    if not os.path.isdir(place):  # also where it cannot be asked: reading it says why
        return Checkpoint(place, (read_header(place),))
    if os.path.lexists(place / INDEX_NAME):  # a link to nothing is no folder without an index
        return _sharded(place)
    return Checkpoint(place, (read_header(_only_file(place)),))


def _only_file(folder: Path) -> Path:
    found = sorted(path.name for path in folder.glob("*.safetensors"))
    if _USUAL_NAME in found:
        return folder / _USUAL_NAME
    if not found:
        raise fault(folder, "there is no safetensors file in it (other formats are not read)")
    if len(found) > 1:
        raise fault(folder, f"several safetensors files and no {INDEX_NAME}: {choices(found)}")
    numbered = _OF_SEVERAL.search(found[0])
    if numbered is not None and int(numbered[1]) > 1:
        raise fault(folder, f"{found[0]!r} is one of several files, and there is no {INDEX_NAME}")
    return folder / found[0]


def _sharded(folder: Path) -> Checkpoint:
    index = folder / INDEX_NAME
    places = parse_object(index, _text_of(index), "index").get("weight_map")
    if not isinstance(places, dict) or not places:
        raise fault(index, "it has no weight_map")
    for name, shard in places.items():
        if not isinstance(shard, str) or Path(shard).name != shard or "\0" in shard:
            raise fault(index, f"it places tensor {brief(name)} in {brief(shard)}, not a file name")
    files = tuple(read_header(folder / shard) for shard in sorted(set(places.values())))
    _check_shards(index, places, files)
    return Checkpoint(folder, files)


def _text_of(index: Path) -> bytes:
    try:
        status = index.stat()
        if not stat.S_ISREG(status.st_mode):  # opening a pipe would wait for a writer
            raise fault(index, "it is not a regular file")
        if status.st_size > MOST_HEADER_BYTES:
            raise fault(index, f"an index has at most 100 MB, this one has {status.st_size} bytes")
        return index.read_bytes()
    except OSError as error:
        raise fault(index, f"it cannot be read ({reason_of(error)})") from error


def _check_shards(index: Path, places: Mapping[str, str], files: tuple[Header, ...]) -> None:
    """Every tensor is in the file that the index names, and in no other."""
    held = {(name, file.path.name) for file in files for name in file.tensors}
    for name, shard in sorted(set(places.items()) - held):
        raise fault(index, f"tensor {brief(name)} is not in {shard!r}")
    for name, shard in sorted(held - set(places.items())):
        raise fault(
            index, f"it does not say that tensor {brief(name)} is in {shard!r}, which is so"
        )
