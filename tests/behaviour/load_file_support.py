"""What do tests of load_file work with? A small checkpoint, and what it must come to."""

from __future__ import annotations

import pytest
import torch
from checkpoints import host_tensor
from support import same_bytes

import cumem

KIB = 1 << 10


@pytest.fixture(autouse=True)
def small_steps() -> None:
    """Buffers so small that a test's files take many of them."""
    cumem.configure(
        cumem.Options(load_buffer_bytes=64 * KIB, load_ring_bytes=512 * KIB, load_threads=3)
    )


def model(seed: int = 0) -> dict[str, torch.Tensor]:
    return {
        "embed": host_tensor(torch.bfloat16, (1000, 96), seed),
        "layer.weight": host_tensor(torch.float32, (301, 127), seed + 1),
        "layer.bias": host_tensor(torch.float32, (127,), seed + 2),
        "steps": host_tensor(torch.int64, (), seed + 3),
    }


def agree(loaded: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> bool:
    return list(loaded) == list(expected) and all(
        loaded[name].dtype == tensor.dtype
        and loaded[name].shape == tensor.shape
        and same_bytes(loaded[name], tensor)
        for name, tensor in expected.items()
    )
