"""How is a module's state, as it is at run time, kept in a file and brought back?

Not a checkpoint: the tensors are those of the runtime, after fusing, quantising and
whatever else a loader did, so that a fresh process needs no loader to get them.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch

from cumem import _runtime
from cumem._boxes import pieces
from cumem._checkpoint import Checkpoint
from cumem._coverage import has_memory
from cumem._dtypes import file_dtype
from cumem._filling import fill, plain_tensors
from cumem._held import held
from cumem._matching import named_tensors, refuse_faults
from cumem._private_file import replacing
from cumem._safetensors import fault, read_header
from cumem._snapshot_format import Notes, distinct, header_bytes, in_file_order, strides_of
from cumem._snapshot_match import destination, differences
from cumem._staging import Staging
from cumem._text import size, some
from cumem.errors import CheckpointError
from cumem.loading import Loaded

_UNTOUCHED = "Nothing was saved; what was there before is as it was."


@dataclass(frozen=True)
class Saved:
    """What a snapshot holds: tensors (tied ones once), and their bytes."""

    tensors: int
    bytes: int


def save_snapshot(
    path: str | Path,
    module: torch.nn.Module,
    *,
    extra: Mapping[str, torch.Tensor] | None = None,
) -> Saved:
    """Writes a module's tensors as they are at run time to one safetensors file.

    All parameters and buffers by name, those outside of the state dict too. Tied tensors
    are written once. The file is readable by its owner alone, is written beside its place
    and takes it once it is on the disk. ``Options.staging_bytes`` of host memory are used,
    and as much of the device's for tensors that are not row-major. State that is no tensor
    is not saved.

    Args:
        path: the file, replaced if there is one; its folder exists.
        module: awake, on any device; nobody writes to it meanwhile.
        extra: more tensors, by names that the module does not have.

    Raises:
        CheckpointError: the file cannot be written (no room, no permission), or tensors
            that a file cannot hold, all of them named. AsleepError: some memory is asleep.
        BusyError: a capture is under way. ValueError: a name that is there twice.
        TypeError: a wrong type. In all cases no half file is left, and what was at
            ``path`` is as it was.
    """
    tensors = _collect(module, extra)
    _refuse_unfit(Path(path), tensors)
    kept, ties = distinct(tensors)
    kept = in_file_order(kept)
    strides = {name: found for name, t in kept.items() if (found := strides_of(t)) is not None}
    notes = Notes(type(module).__name__, ties, strides, tuple(extra or ()))
    header = header_bytes(kept, notes)
    payload = sum(tensor.numel() * tensor.element_size() for tensor in kept.values())
    staging = Staging(_runtime.current_options().staging_bytes)
    staging.prepare(kept.values())
    with held({name: [tensor] for name, tensor in kept.items()}, "save_snapshot"):
        _write(Path(path), header, _payload(kept, staging), len(header) + payload)
    return Saved(len(kept), payload)


def restore_snapshot(
    path: str | Path,
    module: torch.nn.Module,
    *,
    extra: Mapping[str, torch.Tensor] | None = None,
) -> Loaded:
    """Brings a fresh module to the state that :func:`save_snapshot` wrote, in place.

    The module is what its constructor left, with any contents. Names, shapes, types,
    strides and ties must be those of the snapshot. No data pointer changes; memory is used
    as by :func:`cumem.load_into`.

    Args:
        path: the file.
        module: awake, on any device; nobody else uses it meanwhile.
        extra: tensors to fill, by the names they were saved under.

    Raises:
        CheckpointError: no snapshot, a damaged or truncated one, or one of another version
            or of another module; all differences are in the message. Nothing was written,
            unless the message says what was: a file that fails while it is read.
        AsleepError: some memory is asleep. BusyError: a capture is under way.
        ValueError: a name that is there twice. TypeError: a wrong type. Nothing was written.
    """
    tensors = _collect(module, extra)
    header = read_header(path)
    notes = Notes.of_header(header)
    refuse_faults(differences(header, notes, tensors, extra or {}), header.path, module)
    targets = {
        name: [destination(tensors[name])] for name in header.tensors if tensors[name].numel()
    }
    fill(Checkpoint(header.path, (header,)), targets, "restore_snapshot")
    return Loaded(len(header.tensors), header.tensor_bytes, 1)


def _collect(
    module: torch.nn.Module, extra: Mapping[str, torch.Tensor] | None
) -> dict[str, torch.Tensor]:
    if not isinstance(module, torch.nn.Module):
        raise TypeError(f"expected a module, not {type(module).__name__}")
    tensors, more = named_tensors(module), dict(extra or {})
    for name, tensor in more.items():
        if not isinstance(name, str) or not isinstance(tensor, torch.Tensor):
            raise TypeError(f"extra must be tensors by name; {name!r} is {type(tensor).__name__}")
    twice = sorted(tensors.keys() & more.keys())
    if twice:
        raise ValueError(f"extra has names of the module: {some(twice)}. Nothing was changed.")
    return {**tensors, **more}


def _refuse_unfit(path: Path, tensors: Mapping[str, torch.Tensor]) -> None:
    unfit = [
        f"{name} ({tensor.dtype}, {tensor.layout}, {tensor.device})"
        for name, tensor in tensors.items()
        if file_dtype(tensor) is None or (tensor.numel() and not has_memory(tensor))
    ]
    if unfit:
        what = f"{len(unfit)} tensor(s) cannot be in a safetensors file: {some(unfit)}"
        raise fault(path, what, _UNTOUCHED)


def _write(path: Path, header: bytes, payload: Iterable[memoryview], total: int) -> None:
    try:
        with replacing(path) as file:
            file.reserve(total)
            file.write(header)
            for part in payload:
                file.write(part)
    except OSError as error:
        what = f"its {size(total)} cannot be written ({error.strerror or error})"
        raise CheckpointError(f"{path}: {what}. {_UNTOUCHED}") from error


def _payload(tensors: Mapping[str, torch.Tensor], staging: Staging) -> Iterator[memoryview]:
    """The bytes of the tensors, row-major; each part is valid until the next."""
    with plain_tensors():
        for tensor in tensors.values():
            whole = tensor.detach()
            for piece in pieces(whole.shape, staging.elements(whole.dtype)):
                yield staging.read(whole[piece])
