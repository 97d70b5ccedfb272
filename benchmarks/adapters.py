"""How is each library told to put tensors to sleep and wake them?

One class for one library, imported only in the process that measures it. To add
one: a class with the members of :class:`Adapter`, and its name in ``ADAPTERS``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Protocol

import torch

WEIGHTS = "weights"  # contents come back
CACHE = "kv_cache"  # contents are discarded


@dataclass(frozen=True)
class Moved:
    """What one sleep or wake moved.

    Attributes:
        copied_bytes: bytes really copied between device and host.
        phases: seconds by phase, where the library tells.
    """

    copied_bytes: int
    phases: Mapping[str, float] = field(default_factory=dict)


class Adapter(Protocol):
    """One library under measurement."""

    name: str
    version: str

    def device(self) -> torch.device:
        """Where tensors are to be made."""
        ...

    def scope(self, tag: str) -> AbstractContextManager[object]:
        """Tensors made inside belong to ``tag``: WEIGHTS or CACHE."""
        ...

    def sleep(self, tags: Sequence[str]) -> Moved:
        """Gives the device memory of these tags back; returns when it is free."""
        ...

    def wake(self, tags: Sequence[str]) -> Moved:
        """Brings it back; returns when contents are valid."""
        ...

    def host_bytes(self) -> int | None:
        """Host memory held for backups now; None: not known."""
        ...


class CumemAdapter:
    """This library, with the options it has by default."""

    name = "cumem"

    def __init__(self) -> None:
        import cumem

        self._cumem = cumem
        self.version = cumem.__version__

    def device(self) -> torch.device:
        return self._cumem.default_device()

    def scope(self, tag: str) -> AbstractContextManager[object]:
        return self._cumem.use_memory_pool(tag)

    def sleep(self, tags: Sequence[str]) -> Moved:
        report = self._cumem.sleep(tags=tags)
        return Moved(report.copied_bytes, dict(report.phases))

    def wake(self, tags: Sequence[str]) -> Moved:
        report = self._cumem.wake_up(tags)
        return Moved(report.restored_bytes, dict(report.phases))

    def host_bytes(self) -> int:
        return self._cumem.stats().host_bytes


ADAPTERS: dict[str, Callable[[], Adapter]] = {"cumem": CumemAdapter}
