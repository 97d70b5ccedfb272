"""The file that loads are measured with, and the proof that it was loaded right.

Every 4 bytes depend on their position and on the tensor.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

import torch
from settings import MIB

_ROW = 4096
_TENSOR_BYTES = 64 * MIB


def write_model(path: Path, target_bytes: int) -> int:
    """Writes a safetensors file of bf16 matrices; returns the bytes of its tensors."""
    count = max(1, round(target_bytes / _TENSOR_BYTES))
    size = min(_TENSOR_BYTES, max(2 * _ROW, target_bytes // (2 * _ROW) * 2 * _ROW))
    header = {
        f"layers.{index}": {
            "dtype": "BF16",
            "shape": [size // (2 * _ROW), _ROW],
            "data_offsets": [index * size, (index + 1) * size],
        }
        for index in range(count)
    }
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    words = _pattern(size // 4, torch.device("cpu"))
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for index in range(count):
            file.write(memoryview((words + index).numpy()).cast("B"))
    return count * size


def same_as_written(tensors: Mapping[str, torch.Tensor]) -> bool:
    """Does each tensor hold what :func:`write_model` wrote?"""
    words: torch.Tensor | None = None
    for name, tensor in tensors.items():
        found = tensor.reshape(-1).view(torch.int32)
        if words is None:
            words = _pattern(found.numel(), found.device)
        if not torch.equal(found, words + int(name.removeprefix("layers."))):
            return False
    return words is not None


def _pattern(count: int, device: torch.device) -> torch.Tensor:
    index = torch.arange(count, dtype=torch.int32, device=device)
    return (index * 1640531527) ^ (index >> 7)
