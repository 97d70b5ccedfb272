"""What does a trace of torch's profiler say about one call? Without torch."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

Event = Mapping[str, Any]
Span = tuple[float, float]  # microseconds of the trace's clock

_COPIES = {"DtoH": "copy to the host", "HtoD": "copy to the device", "DtoD": "copy on the device"}
_ON_DEVICE = ("gpu_memcpy", "gpu_memset", "kernel")
_LONGEST_NAME = 48
_CALLS = ("cuda_driver", "cuda_runtime")


@dataclass(frozen=True)
class Activity:
    """All of one kind that the device did within a call; times in milliseconds.

    Attributes:
        busy: during which at least one of it was under way.
        starts, ends: of the first and the last, from the begin of the call.
        idle: between the first and the last with none of it under way.
        longest_gap: the longest such pause.
    """

    kind: str
    count: int
    bytes: int
    busy: float
    starts: float
    ends: float
    idle: float
    longest_gap: float


@dataclass(frozen=True)
class Call:
    """All calls of one name into CUDA that the profiler saw; milliseconds."""

    name: str
    count: int
    milliseconds: float


def load(file: Path) -> list[Event]:
    """The events of a trace that have a duration."""
    record = json.loads(file.read_text(encoding="utf-8"))
    return [event for event in record["traceEvents"] if event.get("ph") == "X"]


def span_of(events: Iterable[Event], name: str) -> Span:
    """When the annotated block of that name ran.

    Raises:
        ValueError: there is none.
    """
    for event in events:
        if event.get("name") == name and event.get("cat") == "user_annotation":
            return _span(event)
    raise ValueError(f"no block {name!r} in the trace")


def activities(events: Iterable[Event], within: Span) -> list[Activity]:
    """What the device did within that time, the longest first."""
    kinds: dict[str, list[Event]] = {}
    for event in _inside(events, within, _ON_DEVICE):
        kinds.setdefault(_kind(event), []).append(event)
    found = [_activity(kind, group, within[0]) for kind, group in kinds.items()]
    return sorted(found, key=lambda item: -item.busy)


def calls(events: Iterable[Event], within: Span) -> list[Call]:
    """Calls into CUDA within that time, by name, the longest first."""
    total: dict[str, list[float]] = {}
    for event in _inside(events, within, _CALLS):
        total.setdefault(str(event["name"]), []).append(float(event["dur"]) / 1e3)
    found = [Call(name, len(times), sum(times)) for name, times in total.items()]
    return sorted(found, key=lambda item: -item.milliseconds)


def _inside(events: Iterable[Event], within: Span, categories: Sequence[str]) -> list[Event]:
    return [
        event
        for event in events
        if event.get("cat") in categories and within[0] <= float(event["ts"]) < within[1]
    ]


def _kind(event: Event) -> str:
    name = str(event["name"])
    if event["cat"] == "kernel":
        return f"kernel {name.split('(')[0]}"[:_LONGEST_NAME]
    if event["cat"] == "gpu_memset":
        return "memset"
    return next((text for word, text in _COPIES.items() if word in name), name)


def _activity(kind: str, events: Sequence[Event], begin: float) -> Activity:
    merged = _merged([_span(event) for event in events])
    gaps = [later[0] - sooner[1] for sooner, later in pairwise(merged)]
    return Activity(
        kind=kind,
        count=len(events),
        bytes=sum(int(event.get("args", {}).get("bytes", 0)) for event in events),
        busy=sum(end - start for start, end in merged) / 1e3,
        starts=(merged[0][0] - begin) / 1e3,
        ends=(merged[-1][1] - begin) / 1e3,
        idle=sum(gaps) / 1e3,
        longest_gap=max(gaps, default=0.0) / 1e3,
    )


def _merged(spans: Sequence[Span]) -> list[Span]:
    """The same time without overlaps, in order."""
    merged: list[Span] = []
    for start, end in sorted(spans):
        if merged and start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(end, merged[-1][1]))
        else:
            merged.append((start, end))
    return merged


def _span(event: Event) -> Span:
    start = float(event["ts"])
    return start, start + float(event["dur"])
