"""How does a safetensors checkpoint get into memory that exists already?

The checkpoint and the module are compared by name, shape and type, and everything
that does not fit is said at once, before the first byte is written. Then one host
tensor at a time is mapped and copied in place. Pickle files are never read.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeAlias

import torch
from safetensors import SafetensorError, safe_open

from cumem import inspection
from cumem._checkpoint import Checkpoint, read_checkpoint
from cumem._safetensors import Header, TensorEntry, fault, read_header
from cumem.errors import AsleepError

__all__ = [
    "Checkpoint",
    "Header",
    "Loaded",
    "TensorEntry",
    "load_weights",
    "read_checkpoint",
    "read_header",
]

NameMap: TypeAlias = Callable[[str], "str | None"]

_MOST_NAMES = 20  # of one kind in a message

# Values of these can be converted into each other; other types must agree.
_FLOATS = frozenset({torch.float64, torch.float32, torch.float16, torch.bfloat16})

_TORCH_NAMES = {
    "F4": "float4_e2m1fn_x2",
    "BOOL": "bool",
    "U8": "uint8",
    "I8": "int8",
    "F8_E4M3": "float8_e4m3fn",
    "F8_E4M3FNUZ": "float8_e4m3fnuz",
    "F8_E5M2": "float8_e5m2",
    "F8_E5M2FNUZ": "float8_e5m2fnuz",
    "F8_E8M0": "float8_e8m0fnu",
    "U16": "uint16",
    "I16": "int16",
    "F16": "float16",
    "BF16": "bfloat16",
    "U32": "uint32",
    "I32": "int32",
    "F32": "float32",
    "U64": "uint64",
    "I64": "int64",
    "F64": "float64",
    "C64": "complex64",
}


@dataclass(frozen=True)
class Loaded:
    """What was copied: tensors, their bytes in the files, and the files."""

    tensors: int
    bytes: int
    files: int


def torch_dtype(entry: TensorEntry) -> torch.dtype | None:
    """Torch's type for a tensor of a file; None where torch has none (6-bit floats)."""
    found = getattr(torch, _TORCH_NAMES.get(entry.dtype, ""), None)
    return found if isinstance(found, torch.dtype) else None


def load_weights(
    module: torch.nn.Module, path: str | Path, *, name_map: NameMap | None = None
) -> Loaded:
    """Copies a checkpoint into the parameters and buffers that ``module`` has.

    Nothing is allocated on the device (a conversion between float types takes one
    tensor's bytes for a moment) and no data pointer changes. Tied weights need one of
    their names in the checkpoint; where it has several, they must hold the same bytes.
    Buffers that are not part of the state dict may be absent.

    Args:
        module: awake, on any device.
        path: a file, or a folder as :func:`read_checkpoint` takes it.
        name_map: turns a name of the checkpoint into one of the module; None as its
            answer leaves the tensor out.

    Raises:
        CheckpointError: a faulty file, or names, shapes or types that do not fit; all
            of them are in the message.
        AsleepError: some memory of the module is asleep.
        Nothing was written in any of these cases.
    """
    checkpoint = read_checkpoint(path)
    plan = _Plan.of(module, checkpoint, name_map)
    plan.refuse_faults(checkpoint, module)
    _refuse_disagreeing_ties(plan, checkpoint)
    # Parameters made in inference mode may be written to only in inference mode.
    with torch.inference_mode():
        for file in checkpoint.files:
            with _opened(file) as source:
                for name in file.tensors:
                    if name in plan.targets:
                        plan.targets[name].copy_(source.get_tensor(name))
    used = [checkpoint.tensors[name].bytes for name in plan.targets]
    return Loaded(len(used), sum(used), len(checkpoint.files))


@dataclass
class _Plan:
    """Which tensor of the checkpoint goes where, and what does not fit."""

    targets: dict[str, torch.Tensor] = field(default_factory=dict)  # by name in the checkpoint
    faults: dict[str, list[str]] = field(default_factory=dict)  # by kind

    @classmethod
    def of(cls, module: torch.nn.Module, checkpoint: Checkpoint, name_map: NameMap | None) -> _Plan:
        plan, tensors = cls(), _tensors(module)
        taken: dict[str, str] = {}  # name in the module -> name in the checkpoint
        for name, entry in checkpoint.tensors.items():
            target = name if name_map is None else name_map(name)
            if target is None:
                continue
            if target not in tensors:
                plan._add("unexpected", name if target == name else f"{name} (as {target})")
            elif target in taken:
                plan._add("mapped twice", f"{taken[target]} and {name} to {target}")
            else:
                taken[target] = name
                plan._match(entry, tensors[target])
        for target in _unfilled(module, tensors, taken):
            plan._add("missing", target)
        return plan

    def _add(self, kind: str, text: str) -> None:
        self.faults.setdefault(kind, []).append(text)

    def _match(self, entry: TensorEntry, target: torch.Tensor) -> None:
        dtype, shape = torch_dtype(entry), _shape(entry)
        if shape != tuple(target.shape):
            self._add("of another shape", _differ(entry.name, list(shape), list(target.shape)))
        elif dtype != target.dtype and not {dtype, target.dtype} <= _FLOATS:
            self._add("of another type", _differ(entry.name, entry.dtype, target.dtype))
        elif target.is_meta:
            self._add("without memory (on the meta device)", entry.name)
        else:
            self.targets[entry.name] = target

    def refuse_faults(self, checkpoint: Checkpoint, module: torch.nn.Module) -> None:
        if self.faults:
            parts = [f"{len(names)} {kind}: {_some(names)}" for kind, names in self.faults.items()]
            kind = type(module).__name__
            raise fault(checkpoint.path, f"it does not fit this {kind}; {'; '.join(parts)}")
        asleep = [name for name, target in self.targets.items() if not inspection.is_mapped(target)]
        if asleep:
            raise AsleepError(
                f"load_weights: {len(asleep)} tensor(s) are asleep: {_some(asleep)}. "
                "Nothing was loaded; wake them first."
            )


def _tensors(module: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Every parameter and buffer by every name it has."""
    return {
        **dict(module.named_parameters(remove_duplicate=False)),
        **dict(module.named_buffers(remove_duplicate=False)),
    }


def _unfilled(
    module: torch.nn.Module, tensors: dict[str, torch.Tensor], taken: Iterable[str]
) -> list[str]:
    """Names that the state dict has and that no tensor of the checkpoint fills, under any name."""
    filled = {_place(tensors[name]) for name in taken}
    wanted = module.state_dict(keep_vars=True).keys() & tensors.keys()
    return [name for name in tensors if name in wanted and _place(tensors[name]) not in filled]


def _place(tensor: torch.Tensor) -> tuple[Any, ...]:
    """The same for tied weights only; those without memory are told apart by object."""
    return (tensor.data_ptr() or id(tensor), tensor.dtype, tensor.shape, tensor.stride())


def _shape(entry: TensorEntry) -> tuple[int, ...]:
    if entry.dtype == "F4" and entry.shape:  # torch counts pairs of these
        return (*entry.shape[:-1], entry.shape[-1] // 2)
    return entry.shape


def _differ(name: str, file: object, module: object) -> str:
    return f"{name} ({file} in the file, {module} in the module)"


def _some(names: list[str]) -> str:
    rest = len(names) - _MOST_NAMES
    return ", ".join(names[:_MOST_NAMES]) + (f" and {rest} more" if rest > 0 else "")


@contextmanager
def _opened(file: Header) -> Iterator[Any]:
    """The file, mapped. What its library refuses is an error of ours."""
    try:
        with safe_open(file.path, framework="pt", device="cpu") as source:
            yield source
    except (SafetensorError, OSError) as error:
        raise fault(file.path, f"it cannot be mapped ({error})") from error


def _refuse_disagreeing_ties(plan: _Plan, checkpoint: Checkpoint) -> None:
    groups: dict[tuple[Any, ...], list[str]] = {}
    for name, target in plan.targets.items():
        groups.setdefault(_place(target), []).append(name)
    for names in groups.values():
        first = _bytes(checkpoint, names[0]) if len(names) > 1 else None
        for name in names[1:]:
            if first is not None and not torch.equal(first, _bytes(checkpoint, name)):
                raise fault(
                    checkpoint.path,
                    f"{names[0]} and {name} are one tensor in the module and differ in the file",
                )


def _bytes(checkpoint: Checkpoint, name: str) -> torch.Tensor:
    (file,) = [file for file in checkpoint.files if name in file.tensors]
    with _opened(file) as source:
        tensor: torch.Tensor = source.get_tensor(name)
    return tensor.reshape(-1).view(torch.uint8)
