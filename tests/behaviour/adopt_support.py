"""What do tests of adopt work with? A module with all that one may hold."""

from __future__ import annotations

import torch
from support import fill_pattern, named_tensors
from torch import nn

import cumem


class Everything(nn.Module):
    """All that a module may hold: ties, views, odd layouts and types, gradients, hooks."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(70, 30)
        self.head = nn.Linear(30, 70, bias=False)
        self.head.weight = self.embedding.weight
        self.fused = nn.Parameter(torch.empty(90, 30))
        self.part = nn.Parameter(self.fused.data[30:60])
        self.turned = nn.Parameter(torch.empty(40, 50).t(), requires_grad=False)
        self.conv = nn.Conv2d(3, 5, 2).to(memory_format=torch.channels_last)
        self.register_buffer("columns", torch.empty(33, 20)[:, 5:17], persistent=False)
        self.register_buffer("row", torch.empty(9).expand(4, 9))
        self.register_buffer("none", torch.empty(3, 0))
        self.register_buffer("bytes", torch.empty(1001, dtype=torch.uint8)[3:])
        self.register_buffer("scalar", torch.empty((), dtype=torch.bfloat16))
        self.register_buffer("tiny", torch.empty(8, dtype=torch.float8_e4m3fn))
        with torch.inference_mode():
            self.frozen = nn.Parameter(torch.empty(100))


def filled(module: nn.Module, seed: int = 1) -> nn.Module:
    for at, tensor in enumerate(named_tensors(module).values()):
        storage = torch.empty(0, dtype=torch.uint8, device=tensor.device)
        fill_pattern(storage.set_(tensor.untyped_storage()), seed + at)
    return module


def everything(tag: str | None) -> nn.Module:
    if tag is None:
        with cumem.default_device():
            return filled(Everything())
    with cumem.use_memory_pool(tag), cumem.default_device():
        module = Everything()
    return filled(module)
