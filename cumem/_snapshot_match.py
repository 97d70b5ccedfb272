"""Is a snapshot one of this module, to the stride?"""

from __future__ import annotations

from collections.abc import Collection, Mapping

import torch

from cumem._boxes import whole
from cumem._coverage import has_memory
from cumem._destinations import Destination
from cumem._dtypes import torch_dtype, torch_shape
from cumem._safetensors import Header, TensorEntry
from cumem._snapshot_format import Notes, distinct, strides_of


def differences(
    header: Header,
    notes: Notes,
    tensors: Mapping[str, torch.Tensor],
    extra: Collection[str],
) -> dict[str, list[str]]:
    """All that differs, as texts by kind; empty when the snapshot fits."""
    saved = {**{name: name for name in header.tensors}, **notes.ties}
    both = [name for name in tensors if name in saved]
    found: dict[str, list[str]] = {
        "not in the module": sorted(saved.keys() - tensors.keys()),
        "not in the snapshot": [name for name in tensors if name not in saved],
        "extra in only one of the two": [
            name for name in both if (name in notes.extra) != (name in extra)
        ],
        "tied differently": _tied_differently(saved, tensors, both),
    }
    for name in both:
        misfit = _misfit(header.tensors[saved[name]], notes.strides.get(saved[name]), tensors[name])
        if misfit is not None:
            found.setdefault(misfit[0], []).append(f"{name} ({misfit[1]})")
    return found


def _tied_differently(
    saved: Mapping[str, str], tensors: Mapping[str, torch.Tensor], both: list[str]
) -> list[str]:
    kept, ties = distinct({name: tensors[name] for name in both})
    here = {**{name: name for name in kept}, **ties}
    partners = [_partners(owners, both) for owners in (saved, here)]
    return [name for name in both if partners[0][name] != partners[1][name]]


def _partners(owners: Mapping[str, str], names: list[str]) -> dict[str, set[str]]:
    """With which names each name shares its tensor."""
    groups: dict[str, set[str]] = {}
    for name in names:
        groups.setdefault(owners[name], set()).add(name)
    return {name: groups[owners[name]] for name in names}


def _misfit(
    entry: TensorEntry, strides: tuple[int, ...] | None, tensor: torch.Tensor
) -> tuple[str, str] | None:
    """What differs of one tensor: kind and text."""
    if torch_shape(entry) != tuple(tensor.shape):
        return "of another shape", _both(list(torch_shape(entry)), list(tensor.shape))
    if torch_dtype(entry) != tensor.dtype:
        return "of another type", _both(entry.dtype, tensor.dtype)
    if tensor.numel() and not has_memory(tensor):
        return "without memory", f"on {tensor.device}"
    if strides != strides_of(tensor):
        here = strides_of(tensor)
        return "with other strides", _both(strides or "row-major", here or "row-major")
    return None


def _both(saved: object, here: object) -> str:
    return f"{saved} in the snapshot, {here} in the module"


def destination(tensor: torch.Tensor) -> Destination:
    """All of the tensor; of elements that an expanded one has many times, each once."""
    view, box = tensor.detach(), list(whole(tensor.shape))
    for axis, stride in enumerate(tensor.stride()):
        if stride == 0 and tensor.shape[axis] > 1:
            view, box[axis] = view.narrow(axis, 0, 1), slice(0, 1)
    return Destination(view, tuple(box))
