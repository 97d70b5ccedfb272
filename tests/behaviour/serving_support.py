"""An engine of two tensors, and the steps of the tests of its controller."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any

from support import MIB, holds_pattern, make

import cumem
from cumem.serving import ServingOptions, SleepController

SECONDS = 30.0  # nothing here takes as long; a test that hangs ends with an error


class Engine:
    """Weights that come back and a KV cache that does not, and their controller."""

    def __init__(self, **options: Any) -> None:
        with cumem.use_memory_pool("weights"):
            self.weights = make(MIB // 3, 1)
        with cumem.use_memory_pool("kv_cache"):
            self.kv = make(5 * MIB, 2)
        self.controller = SleepController(options=ServingOptions(**options))
        self.served = 0

    def intact(self) -> bool:
        return holds_pattern(self.weights, 1)

    def read(self) -> bool:
        """A request's work. It would end the process on sleeping memory."""
        assert not cumem.is_sleeping(), "a request ran on sleeping memory"
        good = self.intact()
        self.served += 1
        return good

    async def serve(self) -> bool:
        async with self.controller.request() as request:
            return await request.run(self.read)


def run(test: Callable[[Engine], Coroutine[Any, Any, None]], **options: Any) -> None:
    """Runs a test of one engine on an event loop of its own."""

    async def whole() -> None:
        engine = Engine(**options)
        async with engine.controller:
            await test(engine)

    asyncio.run(asyncio.wait_for(whole(), SECONDS))


class Held:
    """A request that runs until it is let go."""

    def __init__(self, controller: SleepController) -> None:
        self._controller = controller
        self._started, self.let_go = asyncio.Event(), asyncio.Event()
        self.task = asyncio.create_task(self._run())

    async def _run(self) -> str:
        async with self._controller.request():
            self._started.set()
            await self.let_go.wait()
        return "served"

    async def started(self) -> Held:
        await self._started.wait()
        return self

    async def end(self) -> str:
        self.let_go.set()
        return await self.task


class Gate:
    """A hook that a transition waits in until it is opened."""

    def __init__(self) -> None:
        self.reached, self.opened = asyncio.Event(), asyncio.Event()

    async def __call__(self) -> None:
        self.reached.set()
        await self.opened.wait()

    async def hook(self) -> None:
        await self()


async def until(condition: Callable[[], bool]) -> None:
    """Lets others go on until the condition holds."""
    while not condition():
        await asyncio.sleep(0.001)


async def outcome(work: Awaitable[Any]) -> Any:
    """What it returns or raises, as a value."""
    (result,) = await asyncio.gather(work, return_exceptions=True)
    return result
