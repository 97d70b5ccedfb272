"""How does a safetensors checkpoint get into memory that exists already?

The checkpoint and the module are compared by name, shape and type, and everything
that does not fit is said at once, before the first byte is written. Then what takes the
file's bytes as they are is streamed into place, and the rest is copied a bounded piece at
a time. Pickle files are never read.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch

from cumem._checkpoint import Checkpoint, read_checkpoint
from cumem._destinations import NameMap
from cumem._dtypes import torch_dtype
from cumem._filling import fill, refuse_disagreeing_ties
from cumem._matching import match
from cumem._safetensors import Header, TensorEntry, read_header

__all__ = [
    "Checkpoint",
    "Header",
    "Loaded",
    "NameMap",
    "TensorEntry",
    "load_into",
    "read_checkpoint",
    "read_header",
    "torch_dtype",
]


@dataclass(frozen=True)
class Loaded:
    """What was copied.

    Attributes:
        tensors: how many, as the files count them.
        bytes: their bytes in the files.
        files: how many files were read.
        missing: names of the module that nothing filled, or not wholly (then with the
            part that is left).
        unexpected: names of the checkpoint that the module does not have.
    """

    tensors: int
    bytes: int
    files: int
    missing: tuple[str, ...] = ()
    unexpected: tuple[str, ...] = ()


def load_into(
    module: torch.nn.Module,
    path_or_dir: str | Path,
    *,
    name_map: NameMap | None = None,
    strict: bool = True,
) -> Loaded:
    """Copies a checkpoint into the parameters and buffers that ``module`` has.

    No data pointer changes, and no device memory is taken. Where memory of cumem's takes
    the file's bytes as they are, several threads read them straight to it through at most
    ``Options.load_ring_bytes`` of pinned host memory, as :func:`load_file` does; what has
    to be converted, and other memory, is copied through twice ``Options.staging_bytes``
    of host memory, and so is all of it where the host has no room for the ring. (Where the
    elements of a destination do not lie one after the other, as in a column of a matrix,
    as much device memory is used, and given back.) Float types are converted, other types
    must agree. Tied weights need one of their names in the checkpoint; where it has
    several, they must hold the same bytes. Buffers that are not part of the state dict may
    be absent.

    Args:
        module: awake, on any device; nobody else uses it meanwhile.
        path_or_dir: a file, or a folder with one or with an index of several. Nobody
            changes it meanwhile.
        name_map: a mapping (names that it lacks stay as they are), or a callable that gets
            the name and the :class:`TensorEntry` (``dtype``, ``shape``). Either answers
            with a name of the module; None to leave the tensor out; a view of a parameter
            or buffer that the tensor fills; a pair of such a view and the slices of the
            tensor that go there; or a list of views and pairs.
        strict: missing and unexpected names are errors. Otherwise they are in the result.

    Raises:
        CheckpointError: a faulty file, or names, shapes or types that do not fit, or
            memory that two tensors would fill; all of them are in the message. Nothing was
            written, unless the message says what was: a file that fails or changes while it
            is read. Tensors that it does not count as whole are undefined then; memory and
            addresses are as before, and the call can be repeated.
        DriverError: the driver refused; what is left is the same, and in the message.
        AsleepError: some memory of the module is asleep. BusyError: a capture is under way.
        DeviceOutOfMemoryError: no room for what columns pass through.
        TypeError: a wrong argument, or an answer of the map that is none. Nothing was
            written by any of these four.
    """
    if not isinstance(module, torch.nn.Module):
        raise TypeError(f"expected a module, not {type(module).__name__}")
    checkpoint = read_checkpoint(path_or_dir)
    found = match(module, checkpoint, name_map)
    found.refuse(checkpoint, module, strict=strict)
    refuse_disagreeing_ties(checkpoint, found.ties.values())
    fill(checkpoint, found.targets, "load_into")
    return Loaded(
        tensors=len(found.targets),
        bytes=sum(checkpoint.tensors[name].bytes for name in found.targets),
        files=len(checkpoint.files),
        missing=tuple(found.missing),
        unexpected=tuple(found.unexpected),
    )
