"""How does memory change while a program runs?

Live bytes, what torch reserves, what cumem tracks and what the device has in use are
different quantities; a mark records all of them at one moment, so that one sees which
step moved which.
"""

from __future__ import annotations

import dataclasses
import importlib
import json
import resource
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cumem import _C, _runtime, _snapshot, hooks
from cumem._devices import DeviceLike, device_index
from cumem._runtime import Runtime
from cumem._text import size, table
from cumem.errors import CumemError, translated
from cumem.hooks import HookHandle, SegmentRange

_STATM = Path("/proc/self/statm")
_HEAD = (
    *("at", "seconds", "live", "reserved", "tracked", "segments"),
    *("mapped", "device used", "backups", "RSS"),
)


@dataclass(frozen=True)
class TagMark:
    """One tag at one moment; sizes in bytes.

    Attributes:
        bytes: of its segments, asleep or awake.
        mapped_bytes: of those, awake.
        live_bytes: in live blocks.
    """

    tag: str
    segments: int
    bytes: int
    mapped_bytes: int
    live_bytes: int


@dataclass(frozen=True)
class Mark:
    """One moment on one device; sizes in bytes.

    Attributes:
        label: what was given to :meth:`Timeline.mark`, or what happened.
        event: ``"mark"``, ``"sleep"`` or ``"wake"``.
        seconds: since the timeline was made.
        live_bytes: in tensors, as torch counts, in pools or not, asleep or not.
        reserved_bytes: reserved by torch, asleep or not (it cannot know).
        tracked_bytes: in cumem's segments, asleep or awake.
        segments: how many those are.
        mapped_bytes: of the tracked, awake.
        device_used_bytes: in use on the device by everybody, as the driver counts.
        backup_bytes: host memory in backups.
        rss_bytes: host memory of this process, backups included.
        tags: the tracked bytes by tag.
    """

    label: str
    event: str
    seconds: float
    live_bytes: int
    reserved_bytes: int
    tracked_bytes: int
    segments: int
    mapped_bytes: int
    device_used_bytes: int
    backup_bytes: int
    rss_bytes: int
    tags: tuple[TagMark, ...]


class Timeline:
    """Records memory at named moments, and at every sleep and wake by itself.

    Use it in a ``with`` block, or :meth:`close` it, to stop recording; what was
    recorded stays. ``str()`` is a table. Safe to use from several threads.

    Args:
        device: the device it watches; None: the current one.

    Raises:
        ValueError: no such device. TypeError: a wrong type.
        DriverError: no usable driver.
    """

    def __init__(self, device: DeviceLike = None) -> None:
        self._runtime = _runtime.current()
        self._device = device_index(device, self._runtime)
        self._started = time.perf_counter()
        self._lock = threading.Lock()
        self._marks: list[Mark] = []
        self._handles = [
            hooks.on_after_unmap(_event_of(self, "sleep")),
            hooks.on_after_map(_event_of(self, "wake")),
        ]
        weakref.finalize(self, _remove, self._handles)

    @property
    def marks(self) -> tuple[Mark, ...]:
        """What was recorded so far, in order."""
        with self._lock:
            return tuple(self._marks)

    def mark(self, label: str) -> Mark:
        """Records this moment.

        Raises:
            TypeError: the label is not a string. DriverError: the driver cannot say.
            Nothing was recorded.
        """
        if not isinstance(label, str):
            raise TypeError(f"a label must be a string, not {type(label).__name__}")
        return self._record(label, "mark")

    def close(self) -> None:
        """Stops recording sleeps and wakes; once or more often."""
        _remove(self._handles)

    def __enter__(self) -> Timeline:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def __str__(self) -> str:
        return table(self._rows())

    def to_markdown(self) -> str:
        """The table as Markdown."""
        return table(self._rows(), markdown=True)

    def to_json(self) -> str:
        """Every mark with all that it recorded, as JSON."""
        name = self._runtime.device_name(self._device)
        marks = [dataclasses.asdict(mark) for mark in self.marks]
        return json.dumps({"device": name, "marks": marks}, indent=2)

    def plot(self, path: str | Path) -> None:
        """Draws it: live bytes as bars, tracked bytes and device use as lines.

        Args:
            path: the file; its suffix says of which kind.

        Raises:
            ValueError: nothing was recorded yet, or an unknown kind of file.
            CumemError: matplotlib is not installed.
        """
        marks = self.marks
        if not marks:
            raise ValueError("nothing was recorded yet; call mark() first")
        _draw(marks, Path(path))

    def _record(self, label: str, event: str) -> Mark:
        with translated(f"mark({label!r})", "Nothing was recorded."):
            taken = _take(self._runtime, self._device)
        found = Mark(label, event, time.perf_counter() - self._started, **taken)
        with self._lock:
            self._marks.append(found)
        return found

    def _note(self, event: str, segments: Sequence[SegmentRange]) -> None:
        """Records a sleep or wake of something on this device."""
        tags = {part.tag for part in segments if part.device == self._device}
        if tags and _runtime.if_started() is self._runtime:
            state = "asleep" if event == "sleep" else "awake"
            self._record(f"{state}: {', '.join(sorted(tags))}", event)

    def _rows(self) -> list[Sequence[str]]:
        return [_HEAD, *(_row(mark) for mark in self.marks)]


def _event_of(timeline: Timeline, event: str) -> Callable[[tuple[SegmentRange, ...]], None]:
    """A hook that does not keep the timeline alive."""
    reference = weakref.ref(timeline)

    def hook(segments: tuple[SegmentRange, ...]) -> None:
        alive = reference()
        if alive is not None:
            alive._note(event, segments)

    return hook


def _remove(handles: list[HookHandle]) -> None:
    for handle in handles:
        handle.remove()


def _take(runtime: Runtime, device: int) -> dict[str, Any]:
    """All that a mark records of one device, by name."""
    snapshot = _snapshot.take(runtime)
    infos = _snapshot.reconciled(runtime, snapshot)
    own = [info for info in infos if info.device == device]
    segments = {segment.address: segment for segment in snapshot}
    known = runtime.allocator.device_info(device)
    return {
        "live_bytes": runtime.backend.allocated_bytes(device),
        "reserved_bytes": runtime.backend.reserved_bytes(device),
        "tracked_bytes": sum(info.bytes for info in own),
        "segments": len(own),
        "mapped_bytes": sum(info.mapped_bytes for info in own),
        "device_used_bytes": known.total_bytes - known.free_bytes,
        "backup_bytes": runtime.allocator.host_usage().used_bytes,
        "rss_bytes": int(_STATM.read_text().split()[1]) * resource.getpagesize(),
        "tags": tuple(
            _tag(tag, [info for info in own if info.owner.tag == tag], segments)
            for tag in sorted({info.owner.tag for info in own})
        ),
    }


def _tag(tag: str, infos: list[_C.SegmentInfo], segments: dict[int, _snapshot.Segment]) -> TagMark:
    live = (_snapshot.live_in(info, segments.get(info.address)) for info in infos)
    return TagMark(
        tag=tag,
        segments=len(infos),
        bytes=sum(info.bytes for info in infos),
        mapped_bytes=sum(info.mapped_bytes for info in infos),
        live_bytes=sum(block.bytes for blocks in live for block in blocks),
    )


def _row(mark: Mark) -> list[str]:
    return [
        mark.label,
        f"{mark.seconds:.2f}",
        *(size(count) for count in (mark.live_bytes, mark.reserved_bytes, mark.tracked_bytes)),
        str(mark.segments),
        *(size(count) for count in (mark.mapped_bytes, mark.device_used_bytes)),
        *(size(count) for count in (mark.backup_bytes, mark.rss_bytes)),
    ]


def plotting() -> Any:
    """The module that draws.

    Raises:
        CumemError: matplotlib is not installed.
    """
    try:
        return importlib.import_module("matplotlib.figure")
    except ImportError as error:
        raise CumemError(f"a plot needs matplotlib ({error}): pip install 'cumem[plot]'") from error


def _draw(marks: Sequence[Mark], path: Path) -> None:
    figures = plotting()
    figure = figures.Figure(figsize=(max(6.0, 1.2 * len(marks)), 4.5), layout="constrained")
    axes = figure.subplots()
    at = range(len(marks))
    axes.bar(at, [mark.live_bytes / 2**30 for mark in marks], color="0.75", label="live in tensors")
    for label, style, values in (
        ("tracked by cumem", "o-", [mark.tracked_bytes for mark in marks]),
        ("mapped by cumem", "s-", [mark.mapped_bytes for mark in marks]),
        ("in use on the device", "^--", [mark.device_used_bytes for mark in marks]),
    ):
        axes.plot(at, [value / 2**30 for value in values], style, label=label)
    axes.set_xticks(list(at), [mark.label for mark in marks], rotation=30, ha="right")
    axes.set_ylabel("GiB")
    axes.set_ylim(bottom=0)
    axes.legend()
    figure.savefig(path)
