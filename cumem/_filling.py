"""How do the tensors of a checkpoint get to their destinations?

File by file. First whatever takes the bytes as they are, in one stream; then the others, of
which each byte is read once, in order, and goes to every destination that wants it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from itertools import pairwise

import torch

from cumem import _runtime
from cumem._boxes import pieces
from cumem._checkpoint import Checkpoint
from cumem._declared import mark_dirty
from cumem._destinations import Destination
from cumem._dtypes import torch_shape
from cumem._held import held, wait_for_devices
from cumem._progress import shown
from cumem._safetensors import Header, TensorEntry, fault
from cumem._staging import Staging
from cumem._streaming import FilePlan, Targets, plan, stream
from cumem._tensor_file import TensorFile, dtype_of, opened

_NOTHING = "Nothing was loaded."


class _Progress:
    """How far it is: tensors, for the message of a failure, and bytes, for who waits."""

    def __init__(self, total: int) -> None:
        self.done = 0
        self.total = total
        self.bytes = 0  # but for those that the core counts
        self._streamed = self._counted()

    def moved(self) -> int:
        return self.bytes + self._counted() - self._streamed

    def _counted(self) -> int:
        runtime = _runtime.if_started()
        return 0 if runtime is None else runtime.allocator.file_bytes()

    def left(self) -> str:
        return (
            f"{self.done} of {self.total} tensors were written and are whole; the others are "
            "undefined now: load again."
        )


def fill(checkpoint: Checkpoint, targets: Targets, operation: str) -> None:
    """Copies every tensor that has destinations.

    pre: everything fits.

    Raises:
        CheckpointError: a file cannot be read, or was changed; says what was written by then.
        DriverError: the driver refused; says the same.
        AsleepError, BusyError, DeviceOutOfMemoryError: nothing was written.
    """
    views = {name: [part.view for part in parts] for name, parts in targets.items()}
    staging, progress = Staging(_runtime.current_options().staging_bytes), _Progress(len(targets))
    staging.prepare(view for parts in views.values() for view in parts)
    with held(views, operation), plain_tensors():
        mark_dirty(list(views.values()))
        plans = [plan(file, targets) for file in checkpoint.files]
        with shown(sum(planned.bytes for planned in plans), progress.moved):
            for planned in plans:
                _fill_from(planned, operation, staging, progress)
        wait_for_devices([view for parts in views.values() for view in parts])


def _fill_from(planned: FilePlan, operation: str, staging: Staging, progress: _Progress) -> None:
    others = planned.others
    if planned.parts:
        _count_writes(planned.targets)
        if not stream(planned, operation, progress.left()):
            others = planned.targets
    progress.done += len(planned.targets) - len(others)
    if not others:
        return
    with opened(planned.file, progress.left) as source:
        for name, parts in others.items():
            entry = planned.file.tensors[name]
            _fill_one(source, entry, parts, staging)
            progress.done += 1
            progress.bytes += entry.bytes


def _count_writes(targets: Targets) -> None:
    """Autograd is to notice writes that torch does not see, as it does those of a copy."""
    for part in (part for parts in targets.values() for part in parts):
        torch.autograd.graph.increment_version(part.view)


@contextmanager
def plain_tensors() -> Iterator[None]:
    """Parameters are written to as the memory they are, whatever kind of parameter they are."""
    # Those made in inference mode may be written to only in inference mode.
    with torch.inference_mode(), torch._C.DisableTorchFunctionSubclass():
        yield


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
