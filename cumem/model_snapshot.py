"""How is a module's state, as it is at run time, kept in a file and brought back?

Not a checkpoint: the tensors are those of the runtime, after fusing, quantising and
whatever else a loader did, so that a fresh process needs no loader to get them.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from cumem import _runtime
from cumem._arguments import flag
from cumem._boxes import pieces
from cumem._checkpoint import Checkpoint
from cumem._coverage import has_memory
from cumem._dtypes import file_dtype
from cumem._filling import fill, plain_tensors
from cumem._held import held, refuse_asleep
from cumem._matching import named_tensors, refuse_faults
from cumem._private_file import UnsyncedFolderError, replacing
from cumem._safetensors import METADATA, Header, fault, read_header
from cumem._snapshot_digests import UNKNOWN, refuse_damaged, written
from cumem._snapshot_format import Notes, distinct, header_bytes, in_file_order, strides_of
from cumem._snapshot_match import destination, differences
from cumem._staging import Staging
from cumem._text import size, some
from cumem.errors import CheckpointError
from cumem.loading import Loaded

_log = logging.getLogger("cumem")

_UNTOUCHED = "Nothing was saved; what was there before is as it was."
_IN_PLACE = "The new file is in its place and whole, but may not be after a failure of power."


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
    are written once. Each tensor has a digest of its bytes. The file is readable by its
    owner alone, is written beside its place and takes it once it is on the disk.
    ``Options.staging_bytes`` of host memory are used, and as much of the device's for
    tensors that are not row-major. State that is no tensor is not saved.

    Args:
        path: the file, replaced if there is one; its folder exists.
        module: awake, on any device; nobody writes to it meanwhile.
        extra: more tensors, by names that the module does not have.

    Raises:
        CheckpointError: the file cannot be written (no room, no permission), or tensors
            that a file cannot hold, all of them named. AsleepError: some memory is asleep.
        BusyError: a capture is under way. ValueError: a name that is there twice.
        TypeError: a wrong type. In all cases no half file is left, and what was at
            ``path`` is as it was, unless the message says that the new file is in its place
            and only its folder could not be brought to the disk.
    """
    tensors = _collect(module, extra)
    _refuse_unfit(Path(path), tensors)
    kept, ties = distinct(tensors)
    kept = in_file_order(kept)
    strides = {name: found for name, t in kept.items() if (found := strides_of(t)) is not None}
    notes = Notes(type(module).__name__, ties, strides, tuple(extra or ()))
    payload = sum(tensor.numel() * tensor.element_size() for tensor in kept.values())
    staging = Staging(_runtime.current_options().staging_bytes)
    staging.prepare(kept.values())
    with held({name: [tensor] for name, tensor in kept.items()}, "save_snapshot"):
        _write(Path(path), kept, notes, staging)
    return Saved(len(kept), payload)


def restore_snapshot(
    path: str | Path,
    module: torch.nn.Module,
    *,
    extra: Mapping[str, torch.Tensor] | None = None,
    verify: bool = True,
) -> Loaded:
    """Brings a fresh module to the state that :func:`save_snapshot` wrote, in place.

    The module is what its constructor left, with any contents. Names, shapes, types,
    strides and ties must be those of the snapshot, and the bytes in the file those that
    were saved. No data pointer changes; memory is used as by :func:`cumem.load_into`.

    Args:
        path: the file.
        module: awake, on any device; nobody else uses it meanwhile.
        extra: tensors to fill, by the names they were saved under.
        verify: read the whole file once before anything is written, and compare the digest
            of every tensor; up to 16 threads with 1 MiB of host memory each do so. False
            saves that time where the file is known to be whole. A snapshot that was saved
            before there were digests is restored unproven, and a warning is logged.

    Raises:
        CheckpointError: no snapshot, a damaged or truncated one, or one of another version
            or of another module; all differences, or all tensors whose bytes are not what
            was saved, are in the message. Nothing was written, unless the message says what
            was: a file that fails or changes while it is read for the module.
        DriverError: the driver refused; what was written is in the message.
        AsleepError: some memory is asleep. BusyError: a capture is under way.
        ValueError: a name that is there twice. TypeError: a wrong type. Nothing was written.
    """
    verify = flag("verify", verify)
    tensors = _collect(module, extra)
    header = read_header(path)
    notes = Notes.of_header(header)
    refuse_faults(differences(header, notes, tensors, extra or {}), header.path, module)
    targets = {
        name: [destination(tensors[name])] for name in header.tensors if tensors[name].numel()
    }
    refuse_asleep({name: [tensors[name]] for name in targets}, "restore_snapshot")
    if verify:
        _prove(header, notes)
    fill(Checkpoint(header.path, (header,)), targets, "restore_snapshot")
    return Loaded(len(header.tensors), header.tensor_bytes, 1)


def _prove(header: Header, notes: Notes) -> None:
    if notes.digests is None:
        _log.warning(
            "%s: it was saved by a version of cumem without digests: its contents are not "
            "verified. Save it again to have them verified.",
            header.path,
        )
    else:
        refuse_damaged(header, notes.digests)


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
        if file_dtype(tensor) is None
        or (tensor.numel() and not has_memory(tensor))
        or not _is_name(name)
    ]
    if unfit:
        what = f"{len(unfit)} tensor(s) cannot be in a safetensors file: {some(unfit)}"
        raise fault(path, what, _UNTOUCHED)


def _is_name(name: str) -> bool:
    """Can a file have a tensor of this name? Its notes have one of the names."""
    return name != METADATA and name.encode(errors="ignore").decode() == name


def _write(path: Path, tensors: Mapping[str, torch.Tensor], notes: Notes, staging: Staging) -> None:
    """Header and tensors; the digests are known at the end and take the places kept for them."""
    header = header_bytes(tensors, replace(notes, digests=dict.fromkeys(tensors, UNKNOWN)))
    total = len(header) + sum(tensor.nbytes for tensor in tensors.values())
    try:
        with replacing(path) as file:
            file.reserve(total)
            file.write(header)
            digests = written(_payload(tensors, staging), tensors, file.write)
            file.rewrite(header_bytes(tensors, replace(notes, digests=digests)))
    except OSError as error:
        what = f"its {size(total)} cannot be written ({error.strerror or error})"
        left = _IN_PLACE if isinstance(error, UnsyncedFolderError) else _UNTOUCHED
        raise CheckpointError(f"{path}: {what}. {left}") from error


def _payload(
    tensors: Mapping[str, torch.Tensor], staging: Staging
) -> Iterator[tuple[str, memoryview]]:
    """Names and bytes of the tensors, row-major; each part is valid until the next."""
    with plain_tensors():
        for name, tensor in tensors.items():
            whole = tensor.detach()
            for piece in pieces(whole.shape, staging.elements(whole.dtype)):
                yield name, staging.read(whole[piece])
