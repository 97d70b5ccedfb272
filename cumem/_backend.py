"""What does cumem need of torch's caching allocator?

Two things provide it: :mod:`cumem._torch` (the real one) and
:mod:`cumem._emulated_backend` (a model of it for tensors on the cpu).
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol


class TorchPool(Protocol):
    """One ``torch.cuda.MemPool``, or the model of one."""

    @property
    def id(self) -> tuple[int, int]: ...

    def use_count(self) -> int: ...


class Backend(Protocol):
    """Torch's side of the allocator, for one kind of tensors."""

    device_type: str  # what torch calls the tensors' device

    def device_count(self) -> int: ...

    def current_device(self) -> int: ...

    def make_pool(self, device: int) -> TorchPool: ...

    def make_plain_pool(self, device: int) -> TorchPool:
        """A pool of torch's own memory, which cumem never hears of."""
        ...

    def use_pool(self, pool: TorchPool, device: int) -> AbstractContextManager[None]:
        """Routes this thread's allocations on ``device`` to ``pool``."""
        ...

    def prepare_stream(self, device: int) -> None:
        """Makes what libraries keep for the current stream, before a pool gets it.

        No capture may be under way on the device.
        """
        ...

    def drop_pool(self, pool: TorchPool) -> None:
        """Gives up a pool; its wholly free segments go back at once.

        No scope and no capture may be open on its device, and nobody else may
        hold it (``use_count() == 1``).
        """
        ...

    def snapshot(self) -> Sequence[dict[str, Any]]:
        """All segments torch knows of, as ``torch.cuda.memory_snapshot`` lists them."""
        ...

    def empty_cache(self) -> None: ...

    def is_capturing(self) -> bool:
        """Is a graph capture under way on the current stream?"""
        ...

    def current_stream(self, device: int) -> int:
        """Handle of the current stream of ``device``."""
        ...

    def streams(self, device: int) -> list[int]:
        """Handles of the streams that torch keeps for ever."""
        ...

    def plain_segments(self) -> AbstractContextManager[None]:
        """Makes torch take segments from the pool's own allocator within the block."""
        ...

    def reserved_bytes(self, device: int) -> int:
        """Bytes that torch counts as reserved on ``device``, asleep or not."""
        ...

    def allocated_bytes(self, device: int) -> int:
        """Bytes that torch counts as handed out to tensors on ``device``, asleep or not."""
        ...

    def device_uuid(self, device: int) -> str | None:
        """What the driver's own tools call the device: ``GPU-...``; None where it has no name."""
        ...
