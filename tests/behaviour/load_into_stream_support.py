"""What do tests of a load in one stream work with? Modules, and the bytes for them."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from checkpoints import host_tensor
from support import outside_scopes, same_bytes
from torch import nn

import cumem
from cumem import _runtime

KIB = 1 << 10
ROWS, WIDTH = 61, 40  # of 160 bytes in float32


@pytest.fixture(autouse=True)
def small_steps() -> None:
    """Buffers so small that a test's files take many of them."""
    cumem.configure(
        cumem.Options(load_buffer_bytes=16 * KIB, load_ring_bytes=64 * KIB, load_threads=3)
    )


class Mixed(nn.Module):
    """Fused rows, columns, other types, other layouts, ties, odd sizes, nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Parameter(torch.zeros(3 * ROWS, WIDTH))
        self.sides = nn.Parameter(torch.zeros(ROWS, 2 * WIDTH))
        self.short = nn.Parameter(torch.zeros(ROWS, WIDTH, dtype=torch.bfloat16))
        self.turned = nn.Parameter(torch.zeros(WIDTH, ROWS).t())
        self.embed = nn.Parameter(torch.zeros(777, 31, dtype=torch.float16))
        self.head = self.embed
        self.register_buffer("odd", torch.zeros(3, dtype=torch.uint8))
        self.register_buffer("flags", torch.zeros(5, dtype=torch.bool))
        self.register_buffer("scalar", torch.zeros((), dtype=torch.int64))
        self.register_buffer("none", torch.zeros(0, 4))


FUSED = ("q", "k", "v")
AS_THEY_ARE = (*FUSED, "head", "embed", "odd", "flags", "scalar")  # tied ones are read once


def source() -> dict[str, torch.Tensor]:
    with outside_scopes():
        tensors = {name: torch.randn(ROWS, WIDTH) for name in (*FUSED, "gate", "up", "short")}
        tensors |= {"turned": torch.randn(ROWS, WIDTH), "none": torch.zeros(0, 4)}
        tensors["embed"] = torch.randn(777, 31).half()
        tensors["head"] = tensors["embed"].clone()
        tensors["odd"] = host_tensor(torch.uint8, (3,), 1)
        tensors["flags"] = torch.tensor([True, False, True, True, False])
        tensors["scalar"] = torch.tensor(123456789)
    order = ("odd", "gate", "q", "short", "v", "embed", "k", "flags", "turned", "head")
    return {name: tensors[name] for name in (*order, "up", "none", "scalar")}


def views(module: nn.Module) -> dict[str, torch.Tensor]:
    q, k, v = module.qkv.view(3, ROWS, WIDTH).unbind(0)
    return {"q": q, "k": k, "v": v, "gate": module.sides[:, :WIDTH], "up": module.sides[:, WIDTH:]}


def pooled(make: Callable[[], nn.Module]) -> nn.Module:
    with cumem.use_memory_pool("weights"), cumem.default_device():
        return make()


def streamed() -> int:
    return _runtime.current().allocator.file_bytes()


def bytes_in(tensors: dict[str, torch.Tensor], *names: str) -> int:
    return sum(tensors[name].nbytes for name in names)


def expect(module: nn.Module, tensors: dict[str, torch.Tensor]) -> None:
    places = {**dict(module.named_parameters(remove_duplicate=False)), **views(module)}
    places |= dict(module.named_buffers())
    with outside_scopes():
        for name, tensor in tensors.items():
            found = places[name].detach().cpu()
            assert torch.equal(found, tensor.to(found.dtype)), name


def linear(count: int = 4) -> nn.Module:
    """Layers of 160 KiB each, all of which are streamed."""
    return pooled(lambda: nn.ModuleList([nn.Linear(200, 200) for _ in range(count)]))


def weights_of(module: nn.Module, seed: int = 1) -> dict[str, torch.Tensor]:
    with outside_scopes():
        return {
            name: host_tensor(torch.uint8, (tensor.nbytes,), seed + at)
            .view(torch.float32)
            .view(tensor.shape)
            for at, (name, tensor) in enumerate(module.state_dict().items())
        }


def holds(module: nn.Module, tensors: dict[str, torch.Tensor]) -> bool:
    return all(same_bytes(t, tensors[name]) for name, t in module.state_dict().items())
