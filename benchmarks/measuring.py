"""What is one sample of a row, and how is it taken?"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from adapters import CACHE, EVERYTHING, Adapter, Moved
from machine import synchronize
from outside import Outside


@dataclass
class Row:
    """One operation, measured several times.

    Attributes:
        name: of the row.
        what: what a sample is.
        direction: of its copies: ``d2h``, ``h2d``, ``both``, or empty for none.
        live_bytes: what the tensors concerned hold.
        offloaded_bytes: of those, what comes back at wake.
        link_bytes: what must cross the link if nothing is left out.
    """

    name: str
    what: str
    direction: str = ""
    live_bytes: int = 0
    offloaded_bytes: int = 0
    link_bytes: int = 0
    samples: list[dict[str, Any]] = field(default_factory=list)


@dataclass(frozen=True)
class Done:
    """What a timed call says it did."""

    copied_bytes: int | None
    phases: Mapping[str, float]


class Meter:
    """Times calls, and looks at memory before and after them."""

    def __init__(self, adapter: Adapter, outside: Outside) -> None:
        self._adapter = adapter
        self._outside = outside
        self._device = adapter.device()
        self._host_at_first = available_host_bytes()

    def sample(self, call: Callable[[], Done]) -> dict[str, Any]:
        """Runs the call between two waits for the device; everything else is not timed."""
        free = self._outside.free_bytes()
        synchronize(self._device)
        started, processor = time.perf_counter(), time.process_time()
        done = call()
        synchronize(self._device)
        seconds = time.perf_counter() - started
        spent = time.process_time() - processor
        now, host = self._outside.free_bytes(), available_host_bytes()
        return {
            "seconds": seconds,
            "cpu_seconds": spent,
            "copied_bytes": done.copied_bytes,
            "host_bytes": self._adapter.host_bytes(),
            "host_bytes_seen_outside": _difference(self._host_at_first, host),
            "freed_bytes_seen_outside": _difference(now, free),
            "phases": dict(done.phases),
        }


def _difference(more: int | None, less: int | None) -> int | None:
    return None if more is None or less is None else more - less


def repeat(count: int, seconds: float, cycle: Callable[[], object]) -> None:
    """Runs the cycle ``count`` times, or fewer when it has taken ``seconds``."""
    started = time.monotonic()
    for _ in range(count):
        cycle()
        if time.monotonic() - started > seconds:
            return


def resolved(moved: Moved, offloaded_bytes: int) -> Done:
    """The bytes of a library that always copies everything are what its tensors hold."""
    known = offloaded_bytes if moved.copied_bytes == EVERYTHING else moved.copied_bytes
    return Done(known, moved.phases)


def added(out: Moved, back: Moved, offloaded_bytes: int) -> Done:
    """Both halves of a switch."""
    halves = resolved(out, offloaded_bytes), resolved(back, offloaded_bytes)
    known = [half.copied_bytes for half in halves]
    phases = {
        f"{name}: {phase}": seconds
        for name, half in zip(("out", "in"), halves, strict=True)
        for phase, seconds in half.phases.items()
    }
    return Done(None if None in known else sum(filter(None, known)), phases)


def comes_back(tags: Sequence[str], live: Mapping[str, int]) -> int:
    """Bytes of these tags' tensors that come back at wake."""
    return sum(live[tag] for tag in tags if tag != CACHE)


def available_host_bytes() -> int | None:
    """What the system could still give to new processes; None: it does not say."""
    try:
        lines = Path("/proc/meminfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return None
    found = [line.split()[1] for line in lines if line.startswith("MemAvailable:")]
    return int(found[0]) * 1024 if found else None
