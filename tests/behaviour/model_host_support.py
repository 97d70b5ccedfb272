"""What do tests of the model host work with? Models of equal size, and steps with their host."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any, TypeVar

import torch
from support import MIB, holds_pattern, make_as

import cumem
from cumem.serving import ModelHost
from cumem.serving._schedule import ModelState

_T = TypeVar("_T")

WEIGHT = MIB
MODEL = 2 * MIB  # the segment it is in, with room for another


class Model(torch.nn.Module):
    """One large parameter with contents of its own."""

    def __init__(self, seed: int, count: int = WEIGHT // 4) -> None:
        super().__init__()
        self.seed = seed
        tensor = make_as(torch.float32, (count,), seed)
        self.weight = torch.nn.Parameter(tensor, requires_grad=False)

    def is_whole(self) -> bool:
        return cumem.is_mapped(self.weight) and holds_pattern(self.weight, self.seed)


def run(work: Callable[[], Awaitable[_T]]) -> _T:
    async def bounded() -> _T:
        return await asyncio.wait_for(work(), 100)

    return asyncio.run(bounded())


@asynccontextmanager
async def host_of(names: str = "abc", *, room: int = 2, **options: Any) -> AsyncIterator[ModelHost]:
    """A host with models of equal size and room for some of them."""
    async with ModelHost(room * MODEL, **options) as host:
        for seed, name in enumerate(names):
            host.add(name, lambda seed=seed: Model(seed), bytes=MODEL)
        yield host


def states(host: ModelHost) -> dict[str, ModelState]:
    return {model.name: model.state for model in host.status().models}


def awake(host: ModelHost) -> str:
    found = [name for name, state in states(host).items() if state is ModelState.AWAKE]
    return "".join(sorted(found))


async def touch(host: ModelHost, names: str) -> None:
    for name in names:
        async with host.use(name) as model:
            assert model.is_whole()


async def settled(host: ModelHost) -> None:
    while any(state is ModelState.MOVING for state in states(host).values()):
        await asyncio.sleep(0.001)
