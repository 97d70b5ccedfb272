"""What of a module's memory must move together?

Tensors whose bytes overlap or touch in one storage: tied weights, views, a fused matrix
with its parts. Such a unit keeps its inner offsets, so that each view stays a view.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from cumem._coverage import Region, has_memory, storage_key

# The widest type has 16 bytes; an offset in a storage is a multiple of its type's size.
_WIDEST = 16


@dataclass(eq=False)
class Unit:
    """Bytes ``begin`` to ``end`` of one storage, and the tensors in them.

    Attributes:
        storage: the storage, held weakly: the unit keeps no memory.
        address: where the unit starts.
        tensors: each object once.
    """

    storage: StorageWeakRef
    address: int
    begin: int
    end: int
    tensors: list[torch.Tensor]

    @property
    def bytes(self) -> int:
        return self.end - self.begin


def units_of(tensors: Iterable[torch.Tensor]) -> list[Unit]:
    """The units of these tensors, in address order; those without bytes are in none."""
    groups: dict[int, dict[int, torch.Tensor]] = {}
    for tensor in tensors:
        if tensor.numel():
            group = groups.setdefault(storage_key(tensor), {})
            group.update((id(member), member) for member in _family(tensor))
    units = [unit for group in groups.values() for unit in _of_storage(list(group.values()))]
    return sorted(units, key=lambda unit: unit.address)


def _family(tensor: torch.Tensor) -> list[torch.Tensor]:
    """The tensor and, if it is a view to autograd, what it is a view of: it keeps that alive."""
    base = tensor._base
    if base is None or storage_key(base) != storage_key(tensor):  # its data was exchanged since
        return [tensor]
    return [tensor, base]


def _of_storage(tensors: list[torch.Tensor]) -> list[Unit]:
    storage = tensors[0].untyped_storage()
    start, reference = storage.data_ptr(), StorageWeakRef(storage)
    units: list[Unit] = []
    for region, tensor in sorted(
        ((Region.of(tensor), tensor) for tensor in tensors), key=lambda pair: pair[0].start
    ):
        if units and region.start <= units[-1].end:
            units[-1].end = max(units[-1].end, region.end)
            units[-1].tensors.append(tensor)
        else:
            begin = region.start // _WIDEST * _WIDEST
            units.append(Unit(reference, start + begin, begin, region.end, [tensor]))
    return units


def unmovable(tensors: Mapping[str, torch.Tensor], device_type: str) -> list[str]:
    """Names of what cannot be moved, with the reason."""
    found = {name: _obstacle(tensor, device_type) for name, tensor in tensors.items()}
    return [f"{name} ({reason})" for name, reason in found.items() if reason]


def _obstacle(tensor: torch.Tensor, device_type: str) -> str | None:
    if not tensor.numel():
        return None
    if tensor.device.type != device_type:
        return f"on {tensor.device}"
    if tensor.layout is not torch.strided or tensor.is_quantized or tensor.is_nested:
        return "not strided"
    if not has_memory(tensor):
        return "without memory of its own"
    return "lazily conjugated or negated" if tensor.is_conj() or tensor.is_neg() else None
