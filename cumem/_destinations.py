"""Where in a module does one tensor of a checkpoint go?"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch

from cumem._boxes import Box, common, shape_of, whole, within
from cumem._dtypes import torch_shape
from cumem._safetensors import TensorEntry, brief

Part: TypeAlias = "torch.Tensor | tuple[torch.Tensor, slice | tuple[slice, ...]]"
Answer: TypeAlias = "str | Part | Sequence[Part] | None"
NameMap: TypeAlias = "Mapping[str, Answer] | Callable[[str, TensorEntry], Answer]"


@dataclass(frozen=True, eq=False)
class Destination:
    """A view of the module's memory, and the box of the source that goes there."""

    view: torch.Tensor
    box: Box

    @classmethod
    def of_whole(cls, view: torch.Tensor, shape: Sequence[int]) -> Destination:
        return cls(view.detach(), whole(shape))

    @property
    def fits(self) -> bool:
        return tuple(self.view.shape) == shape_of(self.box)

    def meet(self, piece: Box) -> tuple[Box, Box] | None:
        """What of the piece goes here: counted from the piece's start, and from the view's."""
        both = common(piece, self.box)
        return None if both is None else (within(both, piece), within(both, self.box))


def answer_of(name_map: NameMap | None, entry: TensorEntry) -> str | list[Destination] | None:
    """What the map says of one tensor; names that a mapping does not have stay as they are.

    Raises:
        TypeError: an answer that is none; the message names the tensor. Whatever the
            map itself raises.
    """
    if name_map is None:
        return entry.name
    if isinstance(name_map, Mapping):
        answer = name_map.get(entry.name, entry.name)
    else:
        answer = name_map(entry.name, entry)
    if answer is None or isinstance(answer, str):
        return answer
    if isinstance(answer, torch.Tensor) or _is_sliced(answer):
        return [_destination(answer, entry)]
    if isinstance(answer, (list, tuple)) and answer:
        if _is_pair(answer) and not isinstance(answer[1], (tuple, torch.Tensor)):
            raise TypeError(
                f"name_map: the slices for {brief(entry.name)} must be a slice or a tuple of "
                f"slices, not {type(answer[1]).__name__}"
            )
        return [_destination(part, entry) for part in answer]
    raise _wrong(entry, answer)


def _is_sliced(answer: Any) -> bool:
    """A view with slices, not several views?"""
    return _is_pair(answer) and _are_slices(answer[1])


def _is_pair(answer: Any) -> bool:
    pair = isinstance(answer, tuple) and len(answer) == 2
    return pair and isinstance(answer[0], torch.Tensor)


def _are_slices(value: Any) -> bool:
    parts = value if isinstance(value, tuple) else (value,)
    return bool(parts) and all(isinstance(part, slice) for part in parts)


def _destination(part: Any, entry: TensorEntry) -> Destination:
    shape = torch_shape(entry)
    if isinstance(part, torch.Tensor):
        return Destination.of_whole(part, shape)
    if not _is_sliced(part):
        raise _wrong(entry, part)
    view, slices = part
    return Destination(view.detach(), _box(entry, slices, shape))


def _box(entry: TensorEntry, slices: Any, shape: tuple[int, ...]) -> Box:
    given = slices if isinstance(slices, tuple) else (slices,)
    if len(given) > len(shape):
        raise TypeError(f"name_map: {len(given)} slices for {brief(entry.name)} of shape {shape}")
    box = list(whole(shape))
    for axis, part in enumerate(given):
        start, stop, step = part.indices(shape[axis])
        if step != 1:
            raise TypeError(f"name_map: slices of {brief(entry.name)} must have step 1, not {step}")
        box[axis] = slice(start, max(start, stop))
    return tuple(box)


def _wrong(entry: TensorEntry, answer: object) -> TypeError:
    return TypeError(
        f"name_map must answer with a name, None, a tensor, a pair of tensor and slices, or a list "
        f"of those; for {brief(entry.name)} it answered with {type(answer).__name__}"
    )
