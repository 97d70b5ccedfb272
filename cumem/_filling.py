"""How do the tensors of a checkpoint get to their destinations?

Each byte of a file is read once, in order, and goes to every destination that wants it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import pairwise

import torch

from cumem import _runtime
from cumem._boxes import pieces
from cumem._checkpoint import Checkpoint
from cumem._declared import mark_dirty
from cumem._destinations import Destination
from cumem._dtypes import torch_shape
from cumem._safetensors import Header, TensorEntry, fault
from cumem._staging import Staging
from cumem._tensor_file import TensorFile, dtype_of, opened

_NOTHING = "Nothing was loaded."


class _Progress:
    """How many tensors are written, for the message of a failure."""

    def __init__(self, total: int) -> None:
        self.done = 0
        self.total = total

    def left(self) -> str:
        return (
            f"{self.done} of {self.total} tensors were written and are whole; the others are "
            "undefined now: load again."
        )


def fill(checkpoint: Checkpoint, targets: Mapping[str, Sequence[Destination]]) -> None:
    """Copies every tensor that has destinations; waits for the devices, before and after.

    pre: everything fits and is awake.

    Raises:
        CheckpointError: a file cannot be read; says what was written by then.
    """
    views = [part.view for parts in targets.values() for part in parts]
    staging, progress = Staging(_runtime.current_options().staging_bytes), _Progress(len(targets))
    wait_for_devices(views)
    mark_dirty(views)
    # Parameters made in inference mode may be written to only in inference mode.
    with torch.inference_mode():
        for file in checkpoint.files:
            with opened(file, progress.left) as source:
                for entry in (file.tensors[name] for name in file.tensors if name in targets):
                    _fill_one(source, entry, targets[entry.name], staging)
                    progress.done += 1
        wait_for_devices(views)


def _fill_one(
    source: TensorFile, entry: TensorEntry, parts: Sequence[Destination], staging: Staging
) -> None:
    most = staging.elements(dtype_of(entry), *(part.view.dtype for part in parts))
    for piece in pieces(torch_shape(entry), most):
        met = [(part.view, both) for part in parts if (both := part.meet(piece)) is not None]
        if not met:
            continue
        read = source.read(entry, piece, staging)
        for view, (from_box, to_box) in met:
            staging.write(view[to_box], read[from_box])


def wait_for_devices(tensors: Iterable[torch.Tensor]) -> None:
    """Waits for all work on every GPU that one of these is on."""
    for device in {tensor.device for tensor in tensors if tensor.device.type == "cuda"}:
        torch.cuda.synchronize(device)


def refuse_disagreeing_ties(checkpoint: Checkpoint, groups: Iterable[Sequence[str]]) -> None:
    """Names that are one tensor in the module must hold the same bytes.

    Raises:
        CheckpointError: they do not, or cannot be read. Nothing was written.
    """
    for one, other in (pair for names in groups for pair in pairwise(names)):
        if not _same_bytes(checkpoint, one, other):
            raise fault(
                checkpoint.path,
                f"{one} and {other} are one tensor in the module and differ in the file",
            )


def _same_bytes(checkpoint: Checkpoint, one: str, other: str) -> bool:
    if checkpoint.tensors[one].dtype != checkpoint.tensors[other].dtype:
        return False
    both = zip(_pieces_of(checkpoint, one), _pieces_of(checkpoint, other), strict=True)
    return all(torch.equal(_raw(mine), _raw(others)) for mine, others in both)


def _raw(piece: torch.Tensor) -> torch.Tensor:
    return piece.view(-1).view(torch.uint8)


def _pieces_of(checkpoint: Checkpoint, name: str) -> Iterator[torch.Tensor]:
    staging = Staging(_runtime.current_options().staging_bytes)
    file, entry = _file_of(checkpoint, name), checkpoint.tensors[name]
    most = staging.elements(dtype_of(entry))
    with opened(file, lambda: _NOTHING) as source:
        for piece in pieces(torch_shape(entry), most):
            yield source.read(entry, piece, staging)


def _file_of(checkpoint: Checkpoint, name: str) -> Header:
    return next(file for file in checkpoint.files if name in file.tensors)
