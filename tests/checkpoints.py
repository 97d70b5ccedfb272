"""Checkpoints for tests: written by hand, so that their layout is what the test wants."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

import torch
from support import contents_of, raw

Tensors = Mapping[str, torch.Tensor]

NAMES = {
    torch.bool: "BOOL",
    torch.uint8: "U8",
    torch.int8: "I8",
    torch.uint16: "U16",
    torch.int16: "I16",
    torch.uint32: "U32",
    torch.int32: "I32",
    torch.uint64: "U64",
    torch.int64: "I64",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float32: "F32",
    torch.float64: "F64",
    torch.complex64: "C64",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.float8_e4m3fnuz: "F8_E4M3FNUZ",
    torch.float8_e5m2fnuz: "F8_E5M2FNUZ",
    torch.float8_e8m0fnu: "F8_E8M0",
}


def host_tensor(dtype: torch.dtype, shape: tuple[int, ...], seed: int) -> torch.Tensor:
    """A tensor on the host with its pattern."""
    tensor = torch.empty(shape, dtype=dtype)
    if tensor.numel():
        raw(tensor).copy_(contents_of(tensor, seed))
    return tensor


def write_file(path: Path, tensors: Tensors, *, padding: int = 0) -> Path:
    """A safetensors file with the tensors' bytes one after the other, in this order.

    Args:
        padding: spaces after the header, which move the payload in the file.
    """
    header: dict[str, object] = {}
    at = 0
    for name, tensor in tensors.items():
        size = tensor.numel() * tensor.element_size()
        header[name] = {
            "dtype": NAMES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [at, at + size],
        }
        at += size
    text = json.dumps(header).encode() + b" " * padding
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for tensor in tensors.values():
            if tensor.numel():
                file.write(raw(tensor).numpy().tobytes())
    return path


def write_shards(folder: Path, shards: Mapping[str, Tensors]) -> Path:
    """A sharded checkpoint with its index."""
    for name, tensors in shards.items():
        write_file(folder / name, tensors)
    places = {tensor: name for name, tensors in shards.items() for tensor in tensors}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": places}))
    return folder
