"""What was carried out, and what does its report say?"""

from __future__ import annotations

from dataclasses import dataclass

from cumem import _C, _runtime
from cumem._phases import Phases
from cumem._plan import Decision
from cumem._runtime import Runtime
from cumem.reports import SleepReport, WakeReport


@dataclass(frozen=True)
class Slept:
    """A sleep that was carried out.

    Attributes:
        ended: the segments that are wholly asleep by it.
    """

    ended: list[Decision]
    result: _C.SleepResult
    phases: Phases

    def report(self, runtime: Runtime, seconds: float) -> SleepReport:
        # One that goes on from a refused unmap was counted as asleep before.
        gone = [item for item in self.ended if not item.info.asleep]
        offloaded = sum(item.backup_bytes for item in gone)
        return SleepReport(
            freed_bytes=self.result.freed_bytes,
            offloaded_bytes=offloaded,
            discarded_bytes=sum(item.discarded_bytes for item in gone),
            copied_bytes=self.result.copied_bytes,
            skipped_bytes=offloaded - self.result.copied_bytes,
            reload_bytes=self.result.reload_bytes,
            disk_bytes=self.result.disk_bytes,
            host_bytes=runtime.allocator.host_usage().held_bytes,
            pageable_bytes=self.result.pageable_bytes,
            seconds=seconds,
            tags=frozenset(item.info.tag for item in self.ended),
            devices=tuple(sorted({item.info.device for item in self.ended})),
            clean_check=self.check,
            phases={**self.phases.seconds, **self.result.phases},
        )

    @property
    def check(self) -> str:
        """How unchanged contents were found out: ``digest``, ``declared`` or ``never``."""
        chosen = _runtime.current_options().clean_check.value
        return chosen if self.result.digested or chosen == "declared" else "never"


@dataclass(frozen=True)
class Woken:
    """A wake that was carried out."""

    segments: list[_C.SegmentInfo]
    result: _C.WakeResult
    undefined: frozenset[str]
    phases: Phases

    def report(self, seconds: float) -> WakeReport:
        return WakeReport(
            mapped_bytes=self.result.mapped_bytes,
            restored_bytes=self.result.restored_bytes,
            seconds=seconds,
            tags=frozenset(info.tag for info in self.segments),
            undefined=self.undefined,
            devices=tuple(sorted({info.device for info in self.segments})),
            phases={**self.phases.seconds, **self.result.phases},
        )
