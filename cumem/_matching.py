"""Does a checkpoint fit a module, and which tensor goes where?

Everything that does not fit is collected, so that it can be said at once and before
the first byte is written.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import torch

from cumem._boxes import shape_of
from cumem._checkpoint import Checkpoint
from cumem._coverage import Coverage, Place, Region, has_memory, place_of, storage_key
from cumem._destinations import Destination, NameMap, answer_of
from cumem._dtypes import torch_dtype, torch_shape
from cumem._safetensors import TensorEntry, fault
from cumem._text import some

# Values of these can be converted into each other; other types must agree.
_FLOATS = frozenset({torch.float64, torch.float32, torch.float16, torch.bfloat16})


def named_tensors(module: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Every parameter and buffer by every name it has."""
    return {
        **dict(module.named_parameters(remove_duplicate=False)),
        **dict(module.named_buffers(remove_duplicate=False)),
    }


@dataclass
class Match:
    """Which tensor of a checkpoint goes where, and what does not fit.

    Attributes:
        targets: by name in the checkpoint.
        ties: names of the checkpoint that are one tensor in the module, in groups.
        missing: names of the module, with the part where it is not the whole.
        unexpected: names of the checkpoint.
        misfits: texts by kind of what is there and cannot be copied.
    """

    targets: dict[str, list[Destination]] = field(default_factory=dict)
    ties: dict[Place, list[str]] = field(default_factory=dict)
    missing: list[str] = field(default_factory=list)
    unexpected: list[str] = field(default_factory=list)
    misfits: dict[str, list[str]] = field(default_factory=dict)

    def add_misfit(self, kind: str, text: str) -> None:
        self.misfits.setdefault(kind, []).append(text)

    def refuse(self, checkpoint: Checkpoint, module: torch.nn.Module, *, strict: bool) -> None:
        """Raises CheckpointError with all that is wrong.

        Missing and unexpected names are wrong only when ``strict``.
        """
        faults = dict(self.misfits)
        if strict:
            faults = {"unexpected": self.unexpected, **faults, "missing": self.missing}
        refuse_faults(faults, checkpoint.path, module)


def refuse_faults(faults: Mapping[str, list[str]], path: Path, module: torch.nn.Module) -> None:
    """Raises one CheckpointError for all faults there are, by kind."""
    parts = [f"{len(texts)} {kind}: {some(texts)}" for kind, texts in faults.items() if texts]
    if parts:
        raise fault(path, f"it does not fit this {type(module).__name__}; {'; '.join(parts)}")


def match(module: torch.nn.Module, checkpoint: Checkpoint, name_map: NameMap | None) -> Match:
    """Compares names, shapes and types.

    Raises:
        TypeError: the map answered with what is no answer.
    """
    matcher = _Matcher(named_tensors(module))
    for entry in checkpoint.tensors.values():
        matcher.take(entry, name_map)
    matcher.find_clashes()
    matcher.find_missing(module.state_dict(keep_vars=True))
    return matcher.match


class _Matcher:
    """One comparison under way."""

    def __init__(self, tensors: dict[str, torch.Tensor]) -> None:
        self.match = Match()
        self._tensors = tensors
        self._storages = {storage_key(tensor): name for name, tensor in tensors.items()}
        self._taken: dict[str, str] = {}  # name in the module -> name in the checkpoint
        self._coverage: dict[int, Coverage] = {}

    def take(self, entry: TensorEntry, name_map: NameMap | None) -> None:
        answer = answer_of(name_map, entry)
        if isinstance(answer, str):
            self._take_name(entry, answer)
        elif answer is not None:
            self._take_views(entry, answer)

    def _take_name(self, entry: TensorEntry, target: str) -> None:
        name = entry.name
        if target not in self._tensors:
            text = name if target == name else f"{name} (as {target})"
            self.match.unexpected.append(text)
            return
        if target in self._taken:
            both = f"{self._taken[target]} and {name} to {target}"
            self.match.add_misfit("written twice", both)
            return
        self._taken[target] = name
        tensor = self._tensors[target]
        tied = self.match.ties.setdefault(place_of(tensor), [])
        tied.append(name)
        self._accept(entry, [Destination.of_whole(tensor, torch_shape(entry))])
        if len(tied) == 1:
            self._cover(tensor, name)

    def _take_views(self, entry: TensorEntry, parts: list[Destination]) -> None:
        if any(storage_key(part.view) not in self._storages for part in parts):
            self.match.add_misfit("mapped to memory that is not the module's", entry.name)
            return
        self._accept(entry, parts)
        for part in parts:
            self._cover(part.view, entry.name)

    def _accept(self, entry: TensorEntry, parts: list[Destination]) -> None:
        """Only what fits becomes a target."""
        misfits = [misfit for part in parts if (misfit := _misfit(entry, part)) is not None]
        for kind, text in misfits:
            self.match.add_misfit(kind, text)
        if not misfits:
            self.match.targets[entry.name] = parts

    def _cover(self, view: torch.Tensor, label: str) -> None:
        if view.numel() and has_memory(view):
            key = storage_key(view)
            self._coverage.setdefault(key, Coverage()).add(Region.of(view), label)

    def find_clashes(self) -> None:
        for key, coverage in self._coverage.items():
            for one, other in coverage.clashes():
                both = f"{one} and {other}" if one != other else f"overlapping parts of {one}"
                self.match.add_misfit("written twice", f"{both} to {self._storages[key]}")

    def find_missing(self, state: Collection[str]) -> None:
        """Names of the state dict that nothing fills, or that are filled in part only."""
        for name, tensor in self._tensors.items():
            if name in state and tensor.numel():
                part = self._missing(name, tensor)
                if part is not None:
                    self.match.missing.append(f"{name} ({part})" if part else name)

    def _missing(self, name: str, tensor: torch.Tensor) -> str | None:
        if not has_memory(tensor):
            return None if name in self._taken else ""
        coverage = self._coverage.get(storage_key(tensor))
        return "" if coverage is None else coverage.missing(tensor)


def _misfit(entry: TensorEntry, part: Destination) -> tuple[str, str] | None:
    """What is wrong with one destination: its kind and its text."""
    dtype, view = torch_dtype(entry), part.view
    if not part.fits:
        shapes = f"{list(shape_of(part.box))} in the file, {list(view.shape)} in the module"
        return "of another shape", f"{entry.name} ({shapes})"
    if dtype is None or (dtype != view.dtype and not {dtype, view.dtype} <= _FLOATS):
        types = f"{entry.dtype} in the file, {view.dtype} in the module"
        return "of another type", f"{entry.name} ({types})"
    if not has_memory(view) and view.numel():
        return "without memory (meta, sparse or a wrapper)", entry.name
    return None
