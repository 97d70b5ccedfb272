"""What do tests of snapshots work with? A module with all that loaders leave, and its bytes."""

from __future__ import annotations

from collections.abc import Callable

import torch
from support import fill_pattern, named_tensors
from torch import nn

import cumem

DTYPES = (torch.bfloat16, torch.float64, torch.float8_e4m3fn, torch.float8_e8m0fnu)
DTYPES += (torch.int8, torch.bool, torch.complex64, torch.uint16, torch.float4_e2m1fn_x2)


class Runtime(nn.Module):
    """What loaders leave: ties, other layouts, buffers outside of the state dict, odd types."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(50, 24)
        self.head = nn.Linear(24, 50, bias=False)
        self.head.weight = self.embedding.weight
        self.turned = nn.Parameter(torch.empty(30, 70).t(), requires_grad=False)
        self.last = nn.Conv2d(3, 5, 2).to(memory_format=torch.channels_last)
        self.register_buffer("table", torch.empty(1001, dtype=torch.int32), persistent=False)
        self.register_buffer("row", torch.empty(9).expand(4, 9))
        self.register_buffer("none", torch.empty(3, 0))
        self.register_buffer("scalar", torch.empty((), dtype=torch.int64))
        self.register_buffer("columns", torch.empty(20, 33)[:, 5:17])
        for at, dtype in enumerate(DTYPES):
            self.register_buffer(f"typed{at}", torch.empty(8, dtype=torch.uint8).view(dtype))


def built(seed: int, make: Callable[[], nn.Module] = Runtime) -> nn.Module:
    with cumem.use_memory_pool("weights"), cumem.default_device():
        module = make()
    for at, tensor in enumerate(named_tensors(module).values()):
        write(tensor, seed + at)
    return module


def write(tensor: torch.Tensor, seed: int) -> None:
    """Positions decide the bytes, also where the elements are not row-major."""
    storage = torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(tensor.untyped_storage())
    fill_pattern(storage, seed)
    if tensor.dtype is torch.bool:
        storage.bitwise_and_(1)
