"""What do the samples of one or more processes say together?"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from settings import GIB

_SCRUB = {
    "weights": ("wake:  weights, at once", "wake:  weights, 0 % changed"),
    "KV": ("wake:  KV, at once", "wake:  KV, later"),
}


def summarise(processes: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """One library's processes as one result, with a summary of each row."""
    ceiling = best_ceiling(processes)
    names = list(dict.fromkeys(row["name"] for process in processes for row in process["rows"]))
    real = not processes[0]["environment"]["emulated"]
    rows = [summary(_joined(processes, name), ceiling, real=real) for name in names]
    return {
        "ceiling_gb_per_s": ceiling,
        "rows": rows,
        "scrub_wait_seconds": _scrub_waits(rows),
        "processes": list(processes),
    }


def best_ceiling(processes: Iterable[Mapping[str, Any]]) -> dict[str, float]:
    """Of each direction the best that plain copies reached, first or last, in any process."""
    best: dict[str, float] = {}
    for process in processes:
        for measured in process["ceilings"]:
            for name, speed in measured.items():
                direction = name.removesuffix("_gb_per_s")
                best[direction] = max(speed, best.get(direction, 0.0))
    return best


def _joined(processes: Iterable[dict[str, Any]], name: str) -> dict[str, Any]:
    rows = [row for process in processes for row in process["rows"] if row["name"] == name]
    return {**rows[0], "samples": [sample for row in rows for sample in row["samples"]]}


def summary(row: dict[str, Any], ceiling: Mapping[str, float], *, real: bool) -> dict[str, Any]:
    """The figures of one row; ``real``: not measured on the emulator."""
    samples = row["samples"]
    seconds = [sample["seconds"] for sample in samples]
    sizes = ("live_bytes", "offloaded_bytes", "link_bytes")
    medians = (
        *("cpu_seconds", "copied_bytes", "host_bytes"),
        *("host_bytes_seen_outside", "freed_bytes_seen_outside"),
    )
    result: dict[str, Any] = {
        **{key: row[key] for key in ("name", "what", "direction", *sizes)},
        "count": len(seconds),
        "median_seconds": statistics.median(seconds),
        "min_seconds": min(seconds),
        "max_seconds": max(seconds),
        **{f"median_{key}": _median(samples, key) for key in medians},
        "median_phases": _phases(samples),
    }
    result["held_bytes"] = _held(result)
    if row["offloaded_bytes"] and result["held_bytes"] is not None:
        result["host_per_live"] = result["held_bytes"] / row["offloaded_bytes"]
    if real:
        result.update(_speeds(result, ceiling))
    return result


def _held(row: Mapping[str, Any]) -> float | None:
    """Host memory for backups: as the library says, or else what the system lacks since."""
    said: float | None = row["median_host_bytes"]
    seen: float | None = row["median_host_bytes_seen_outside"]
    return seen if said is None and row["offloaded_bytes"] else said


def _speeds(row: Mapping[str, Any], ceiling: Mapping[str, float]) -> dict[str, float]:
    """What only a real device has: speeds, and how far they are from plain copies."""
    seconds, direction = row["median_seconds"], row["direction"]
    found: dict[str, float] = {}
    if row["median_copied_bytes"] and direction:
        found["gb_per_s"] = row["median_copied_bytes"] / seconds / 1e9
    if direction in ceiling:
        found["link_seconds"] = row["link_bytes"] / ceiling[direction] / 1e9
        if "gb_per_s" in found:
            found["of_ceiling"] = found["gb_per_s"] / ceiling[direction]
    if not row["offloaded_bytes"] and row["live_bytes"]:
        found["ms_per_gib"] = seconds * 1e3 / (row["live_bytes"] / GIB)
    return found


def _scrub_waits(rows: Iterable[Mapping[str, Any]]) -> dict[str, float]:
    """What a wake at once takes longer than one after a rest, where both were measured."""
    medians = {row["name"]: row["median_seconds"] for row in rows}
    return {
        what: medians[at_once] - medians[rested]
        for what, (at_once, rested) in _SCRUB.items()
        if at_once in medians and rested in medians
    }


def _median(samples: Sequence[dict[str, Any]], name: str) -> float | None:
    known = [sample[name] for sample in samples if sample.get(name) is not None]
    return statistics.median(known) if known else None


def _phases(samples: Sequence[dict[str, Any]]) -> dict[str, float]:
    names = dict.fromkeys(name for sample in samples for name in sample["phases"])
    return {
        name: statistics.median(sample["phases"].get(name, 0.0) for sample in samples)
        for name in names
    }
