"""How is each library told to put tensors to sleep and wake them?

One class for one library, which imports it when it is made: in the process that
measures it, and in no other. To add one: a subclass of :class:`Adapter`, and its
place in ``libraries.py``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, ClassVar, Literal

if TYPE_CHECKING:
    import torch

    from cumem import SleepReport, WakeReport

WEIGHTS = "weights"  # contents come back, as those of every other tag
CACHE = "kv_cache"  # contents are discarded

EVERYTHING: Literal["everything"] = "everything"


class UnavailableError(Exception):
    """The library cannot be measured here; says why."""


@dataclass(frozen=True)
class Moved:
    """What one sleep or wake moved.

    Attributes:
        copied_bytes: bytes really copied between device and host; ``EVERYTHING``: all
            that the tags' tensors hold and that comes back, because this library never
            does less; None: it does not tell.
        phases: seconds by phase, where the library tells.
    """

    copied_bytes: int | Literal["everything"] | None
    phases: Mapping[str, float] = field(default_factory=dict)


class Adapter:
    """One library under measurement.

    Attributes:
        prepares: it can make host memory before the first sleep.
        switches: it can exchange two tags in one call.
        copies_everything: a sleep copies all that comes back, changed or not, so that one
            share of changed tensors says all.
    """

    name: ClassVar[str]
    prepares: ClassVar[bool] = False
    switches: ClassVar[bool] = False
    copies_everything: ClassVar[bool] = False
    version: str

    def device(self) -> torch.device:
        """Where tensors are to be made."""
        import torch

        return torch.device("cuda")

    def scope(self, tag: str) -> AbstractContextManager[object]:
        """Tensors made inside belong to ``tag``."""
        raise NotImplementedError

    def sleep(self, tags: Sequence[str]) -> Moved:
        """Gives the device memory of these tags back; returns when it is free."""
        raise NotImplementedError

    def wake(self, tags: Sequence[str]) -> Moved:
        """Brings it back; returns when contents are valid."""
        raise NotImplementedError

    def prepare(self, tags: Sequence[str]) -> None:
        """Makes host memory for a sleep of these tags; returns when it is there."""
        raise NotImplementedError

    def switch(self, leaving: str, arriving: str) -> tuple[Moved, Moved]:
        """Puts one tag to sleep and wakes another; what moved out, and what in."""
        raise NotImplementedError

    def host_bytes(self) -> int | None:
        """Host memory held for backups now; None: it does not tell."""
        return None


def slept(report: SleepReport) -> Moved:
    """What this library says of a sleep."""
    return Moved(report.copied_bytes, dict(report.phases))


def woken(report: WakeReport) -> Moved:
    """What this library says of a wake."""
    return Moved(report.restored_bytes, dict(report.phases))


class CumemAdapter(Adapter):
    """This library, with the options it has by default."""

    name = "cumem"
    prepares = True
    switches = True

    def __init__(self) -> None:
        import cumem

        self._cumem = cumem
        self.version = cumem.__version__

    def device(self) -> torch.device:
        return self._cumem.default_device()

    def scope(self, tag: str) -> AbstractContextManager[object]:
        return self._cumem.use_memory_pool(tag)

    def sleep(self, tags: Sequence[str]) -> Moved:
        return slept(self._cumem.sleep(tags=tags))

    def wake(self, tags: Sequence[str]) -> Moved:
        return woken(self._cumem.wake_up(tags))

    def prepare(self, tags: Sequence[str]) -> None:
        self._cumem.prepare(tags, background=False)

    def switch(self, leaving: str, arriving: str) -> tuple[Moved, Moved]:
        report = self._cumem.switch(sleep_tags=[leaving], wake_tags=[arriving])
        return slept(report.sleep), woken(report.wake)

    def host_bytes(self) -> int | None:
        return self._cumem.stats().host_bytes
