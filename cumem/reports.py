"""What does a sleep or a wake say it did?"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from cumem._text import size


def _names(tags: frozenset[str]) -> str:
    return ", ".join(sorted(tags)) or "nothing"


@dataclass(frozen=True)
class SleepReport:
    """What one sleep did.

    Attributes:
        freed_bytes: device memory given back to the driver, by whole segments. In a
            switch without what went to the arriving segments directly.
        offloaded_bytes: live bytes that will come back at wake.
        discarded_bytes: live bytes that will not.
        copied_bytes: of the offloaded, bytes that were moved by this call.
        skipped_bytes: of the offloaded, bytes that were not, because they had not changed.
        reload_bytes: of these, bytes that are left to the files they were loaded from.
        disk_bytes: bytes on disk that hold backups of what went to sleep.
        host_bytes: host memory that cumem holds after the call.
        pageable_bytes: of that, memory that is not pinned, by choice or because the driver
            refused (slower copies).
        seconds: wall time of the call.
        tags: tags of which something went to sleep in this call.
        devices: ordinals of the devices concerned.
        clean_check: how unchanged contents were found out: ``"digest"``,
            ``"declared"``, or ``"never"`` (not at all: everything was copied).
        phases: seconds by phase, one after the other; but ``touch`` and ``pin`` are parts
            of ``copy``, and ``pin`` adds up what several threads did at once.
    """

    freed_bytes: int = 0
    offloaded_bytes: int = 0
    discarded_bytes: int = 0
    copied_bytes: int = 0
    skipped_bytes: int = 0
    reload_bytes: int = 0
    disk_bytes: int = 0
    host_bytes: int = 0
    pageable_bytes: int = 0
    seconds: float = 0.0
    tags: frozenset[str] = frozenset()
    devices: tuple[int, ...] = ()
    clean_check: str = "never"
    phases: Mapping[str, float] = field(default_factory=dict)

    def __str__(self) -> str:
        pageable = f", {size(self.pageable_bytes)} of it pageable" if self.pageable_bytes else ""
        files = f", left to files {size(self.reload_bytes)}" if self.reload_bytes else ""
        disk = f", disk {size(self.disk_bytes)}" if self.disk_bytes else ""
        return (
            f"slept {_names(self.tags)}: freed {size(self.freed_bytes)}, "
            f"offloaded {size(self.offloaded_bytes)} (copied {size(self.copied_bytes)}, "
            f"skipped {size(self.skipped_bytes)}), discarded {size(self.discarded_bytes)}, "
            f"host memory held {size(self.host_bytes)}{pageable}{files}{disk}, "
            f"in {self.seconds:.3f} s"
        )


@dataclass(frozen=True)
class SleepPlan:
    """What a sleep would do.

    Attributes:
        freed_bytes: device memory it would give back, by whole segments.
        offloaded_bytes: live bytes that would come back at wake.
        discarded_bytes: live bytes that would not.
        host_bytes: host memory it would still have to take from the system.
        tags: tags of which something would go to sleep.
        devices: ordinals of the devices concerned.
        changed_files: files that memory is to be reloaded from, and that have changed since
            or cannot be read: the sleep raises ``CheckpointError`` unless everything that
            came from them was written since.
    """

    freed_bytes: int = 0
    offloaded_bytes: int = 0
    discarded_bytes: int = 0
    host_bytes: int = 0
    tags: frozenset[str] = frozenset()
    devices: tuple[int, ...] = ()
    changed_files: tuple[str, ...] = ()

    def __str__(self) -> str:
        files = ", ".join(repr(path) for path in self.changed_files)
        changed = f"; would be refused where it needs a file that has changed: {files}"
        return (
            f"would sleep {_names(self.tags)}: free {size(self.freed_bytes)}, "
            f"offload {size(self.offloaded_bytes)}, discard {size(self.discarded_bytes)}, "
            f"take {size(self.host_bytes)} of host memory{changed if files else ''}"
        )


@dataclass(frozen=True)
class WakeReport:
    """What one wake did.

    Attributes:
        mapped_bytes: device memory taken from the driver, by whole segments.
        restored_bytes: bytes that came back from backups.
        seconds: wall time of the call.
        tags: tags of which something woke in this call.
        undefined: of those, tags with contents that were discarded (also when filled).
        devices: ordinals of the devices concerned.
        phases: seconds by phase.
    """

    mapped_bytes: int = 0
    restored_bytes: int = 0
    seconds: float = 0.0
    tags: frozenset[str] = frozenset()
    undefined: frozenset[str] = frozenset()
    devices: tuple[int, ...] = ()
    phases: Mapping[str, float] = field(default_factory=dict)

    def __str__(self) -> str:
        undefined = f", contents undefined: {_names(self.undefined)}" if self.undefined else ""
        return (
            f"woke {_names(self.tags)}: mapped {size(self.mapped_bytes)}, "
            f"restored {size(self.restored_bytes)}{undefined}, in {self.seconds:.3f} s"
        )


@dataclass(frozen=True)
class SwitchReport:
    """What one switch did: its two halves went on at the same time.

    Attributes:
        sleep: what went to sleep; its ``seconds`` are those of the whole.
        wake: what woke; likewise.
        seconds: wall time of the call.
    """

    sleep: SleepReport = field(default_factory=SleepReport)
    wake: WakeReport = field(default_factory=WakeReport)
    seconds: float = 0.0

    def __str__(self) -> str:
        return f"switched in {self.seconds:.3f} s: {self.sleep}; {self.wake}"
