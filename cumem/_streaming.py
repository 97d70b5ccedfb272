"""Which tensors take the bytes of a file as they are, and how do they get them?

All of a file's at once, through the ring of pinned buffers in csrc/core/staging.h: threads
read while others copy. Only memory of cumem's gets there: the core proves that it is mapped
and keeps it so. Memory of others, and whatever is converted or does not lie in one run,
passes through cumem/_staging.py.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from cumem import _owned, _runtime
from cumem._boxes import first_element, is_run
from cumem._destinations import Destination
from cumem._dtypes import torch_dtype, torch_shape
from cumem._held_file import held_file
from cumem._runtime import Runtime
from cumem._safetensors import Header, TensorEntry
from cumem.errors import HostOutOfMemoryError, translated

Targets: TypeAlias = "Mapping[str, Sequence[Destination]]"
Part: TypeAlias = "tuple[int, int, int]"  # address, offset in the file, bytes


@dataclass(frozen=True)
class FilePlan:
    """Which way each destination of a file's tensors gets its bytes.

    Attributes:
        file: the file.
        targets: all of them, by the tensor's name.
        parts: for the ring, in the order of the file.
        others: destinations that go another way, by the tensor's name.
    """

    file: Header
    targets: Targets
    parts: Sequence[Part]
    others: Targets

    @property
    def bytes(self) -> int:
        """To be moved in all."""
        other = sum(self.file.tensors[name].bytes for name in self.others)
        return other + sum(part[2] for part in self.parts)


def plan(file: Header, targets: Targets) -> FilePlan:
    """Which way each of ``targets`` goes that is in the file.

    pre: tensors whose destinations share bytes (tied ones, and views of one another) hold
    the same there. Every tensor is seen as the memory it is.
    """
    runtime = _runtime.if_started()
    found: list[tuple[Part, str, Destination]] = []
    others: dict[str, list[Destination]] = {}
    own = {name: targets[name] for name in file.tensors if name in targets}
    for name, destinations in own.items():
        for to in destinations:
            part = _part(runtime, file.tensors[name], to)
            if part is None:
                others.setdefault(name, []).append(to)
            else:
                found.append((part, name, to))
    parts, crossing = _apart(found)
    for name, to in crossing:
        others.setdefault(name, []).append(to)
    return FilePlan(file, own, sorted(parts, key=lambda part: part[1]), others)


def _apart(
    found: Sequence[tuple[Part, str, Destination]],
) -> tuple[list[Part], list[tuple[str, Destination]]]:
    """Parts that share no byte, and what goes past one of them; what lies in one needs nothing."""
    parts: list[Part] = []
    crossing: list[tuple[str, Destination]] = []
    end = 0
    for part, name, to in sorted(found, key=lambda item: (item[0][0], -item[0][2])):
        address, _, size = part
        if address >= end:
            parts.append(part)
            end = address + size
        elif address + size > end:
            crossing.append((name, to))
    return parts, crossing


def _part(runtime: Runtime | None, entry: TensorEntry, to: Destination) -> Part | None:
    """None where the bytes cannot be read straight to where they go."""
    view, shape = to.view, torch_shape(entry)
    as_is = view.dtype == torch_dtype(entry) and not (view.is_conj() or view.is_neg())
    if not (as_is and view.numel() and view.is_contiguous() and is_run(to.box, shape)):
        return None
    address, size = view.data_ptr(), view.dtype.itemsize
    if runtime is None or runtime.allocator.owner_of(address) is None:
        return None
    return address, entry.begin + first_element(to.box, shape) * size, view.numel() * size


def stream(planned: FilePlan, operation: str, left: str) -> bool:
    """Reads the parts; False: the host has no room for the ring, and they go another way.

    The bytes are there for every stream when it returns. pre: the tags are held awake.

    Args:
        planned: with parts.
        operation: the call, for messages.
        left: says what is left when it fails.

    Raises:
        CheckpointError: the file cannot be read, or is or was changed. DriverError: the
            driver refused. BusyError: a capture is under way.
    """
    runtime = _runtime.current()
    try:
        with translated(operation, left, _owned.kind(runtime), changed=left):
            held_file(planned.file, left).read_into(runtime.allocator, planned.parts)
    except HostOutOfMemoryError:
        return False
    return True
