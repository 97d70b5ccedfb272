"""How long does each part of a call take, and where is it on a profiler's time line?"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from cumem import _runtime


class Phases:
    """Seconds by phase of one call, what Python does of it.

    Under ``Options(nvtx=True)`` each is a range of the thread's, too.
    """

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}

    @contextmanager
    def of(self, name: str) -> Iterator[None]:
        """Adds the time of the block to the phase ``name``."""
        started = time.perf_counter()
        try:
            with marked(name):
                yield
        finally:
            spent = time.perf_counter() - started
            self.seconds[name] = self.seconds.get(name, 0.0) + spent


@contextmanager
def marked(name: str) -> Iterator[None]:
    """Makes the block a range ``cumem.NAME`` of NVTX where that is wanted, else nothing."""
    if not (_runtime.current_options().nvtx and has_nvtx()):
        yield
        return
    torch.cuda.nvtx.range_push(f"cumem.{name}")
    try:
        yield
    finally:
        torch.cuda.nvtx.range_pop()


def has_nvtx() -> bool:
    """Can this build of torch mark ranges? One without CUDA cannot."""
    return bool(torch.backends.cuda.is_built())
