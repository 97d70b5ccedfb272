"""Which type of torch's is which type of a safetensors file?"""

from __future__ import annotations

import torch

from cumem._safetensors import TensorEntry

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
_FILE_NAMES = {f"torch.{name}": file_name for file_name, name in _TORCH_NAMES.items()}
_PAIRS = "F4"  # torch counts pairs of these, a file counts each


def torch_dtype(entry: TensorEntry) -> torch.dtype | None:
    """Torch's type for a tensor of a file; None where torch has none (6-bit floats)."""
    found = getattr(torch, _TORCH_NAMES.get(entry.dtype, ""), None)
    return found if isinstance(found, torch.dtype) else None


def torch_shape(entry: TensorEntry) -> tuple[int, ...]:
    """The shape that torch gives a tensor of a file."""
    if entry.dtype == _PAIRS and entry.shape:
        return (*entry.shape[:-1], entry.shape[-1] // 2)
    return entry.shape


def file_dtype(tensor: torch.Tensor) -> str | None:
    """The name that a file has for the type; None where it has none (complex128, quantized)."""
    name = _FILE_NAMES.get(str(tensor.dtype))
    return None if name == _PAIRS and tensor.dim() == 0 else name


def file_shape(tensor: torch.Tensor) -> tuple[int, ...]:
    """The shape that a file gives a tensor."""
    shape = tuple(tensor.shape)
    if file_dtype(tensor) == _PAIRS:
        return (*shape[:-1], shape[-1] * 2)
    return shape
