"""What do the samples of one or more processes say together?"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence
from typing import Any

GIB = 1 << 30

_COLUMNS = (
    *("row", "n", "median ms", "min", "max", "CPU ms"),
    *("copied GiB", "GB/s", "of copy", "ms/GiB", "freed GiB", "host GiB"),
)


def summarise(processes: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """One library's processes as one result, with a summary of each row."""
    ceiling = _ceiling(processes)
    names = list(dict.fromkeys(row["name"] for process in processes for row in process["rows"]))
    rows = [_summary(_joined(processes, name), ceiling, processes[0]) for name in names]
    return {"ceiling_gb_per_s": ceiling, "rows": rows, "processes": list(processes)}


def _ceiling(processes: Iterable[dict[str, Any]]) -> dict[str, float]:
    """Of each direction the best that a plain copy reached, first or last, in any process."""
    measured = [
        process[when] for process in processes for when in ("ceiling_first", "ceiling_last")
    ]
    return {
        direction: max(known[f"{direction}_gb_per_s"] for known in measured)
        for direction in ("d2h", "h2d")
        if all(measured)
    }


def _joined(processes: Iterable[dict[str, Any]], name: str) -> dict[str, Any]:
    rows = [row for process in processes for row in process["rows"] if row["name"] == name]
    return {**rows[0], "samples": [sample for row in rows for sample in row["samples"]]}


def _summary(
    row: dict[str, Any], ceiling: dict[str, float], process: dict[str, Any]
) -> dict[str, Any]:
    samples = row["samples"]
    seconds = [sample["seconds"] for sample in samples]
    median = statistics.median(seconds)
    result: dict[str, Any] = {
        "name": row["name"],
        "what": row["what"],
        "count": len(seconds),
        "median_seconds": median,
        "min_seconds": min(seconds),
        "max_seconds": max(seconds),
        "median_cpu_seconds": _median(samples, "cpu_seconds"),
        "copied_bytes": _median(samples, "copied_bytes"),
        "host_bytes": _median(samples, "host_bytes"),
        "freed_bytes_seen_outside": _median(samples, "freed_bytes_seen_outside"),
        "median_phases": _phases(samples),
    }
    speeds = [sample["copied_bytes"] / sample["seconds"] / 1e9 for sample in samples]
    real = not process["environment"]["emulated"]
    if real and row["direction"] and all(sample["copied_bytes"] for sample in samples):
        result["gb_per_s"] = statistics.median(speeds)
        if row["direction"] in ceiling:
            result["of_ceiling"] = result["gb_per_s"] / ceiling[row["direction"]]
    if not row["direction"] and process["kv_bytes"]:
        result["ms_per_gib"] = median * 1e3 / (process["kv_bytes"] / GIB)
    return result


def _median(samples: Sequence[dict[str, Any]], name: str) -> float | None:
    known = [sample[name] for sample in samples if sample[name] is not None]
    return statistics.median(known) if known else None


def _phases(samples: Sequence[dict[str, Any]]) -> dict[str, float]:
    names = dict.fromkeys(name for sample in samples for name in sample["phases"])
    return {
        name: statistics.median(sample["phases"].get(name, 0.0) for sample in samples)
        for name in names
    }


def table(result: dict[str, Any]) -> str:
    """The summary for people to read."""
    lines = [_COLUMNS, *(_line(row) for row in result["rows"])]
    widths = [max(len(line[column]) for line in lines) for column in range(len(_COLUMNS))]
    text = [
        "  ".join(
            cell.ljust(width) if column == 0 else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(line, widths, strict=True))
        )
        for line in lines
    ]
    return "\n".join([_heading(result), "", text[0], "-" * len(text[0]), *text[1:]])


def _line(row: dict[str, Any]) -> tuple[str, ...]:
    times = ("median_seconds", "min_seconds", "max_seconds", "median_cpu_seconds")
    return (
        row["name"],
        str(row["count"]),
        *(f"{row[name] * 1e3:.1f}" for name in times),
        _gib(row["copied_bytes"]),
        f"{row['gb_per_s']:.1f}" if "gb_per_s" in row else "-",
        f"{row['of_ceiling'] * 100:.1f} %" if "of_ceiling" in row else "-",
        f"{row['ms_per_gib']:.2f}" if "ms_per_gib" in row else "-",
        _gib(row["freed_bytes_seen_outside"]),
        _gib(row["host_bytes"]),
    )


def _gib(count: float | None) -> str:
    return f"{count / GIB:.2f}" if count else "-"


def _heading(result: dict[str, Any]) -> str:
    process = result["processes"][0]
    adapter, machine = process["adapter"], process["environment"]
    lines = [
        f"{adapter['name']} {adapter['version']}, {len(result['processes'])} process(es): "
        f"{process['weights_bytes'] / GIB:.2f} GiB of weights in {process['weights_tensors']} "
        f"tensors, {process['kv_bytes'] / GIB:.2f} GiB of KV in {process['kv_tensors']}"
    ]
    if machine["emulated"]:
        return "\n".join([*lines, "EMULATED DRIVER: no number here is a performance figure"])
    ceiling = result["ceiling_gb_per_s"]
    lines.append(
        f"{machine['gpu']}, driver {machine['link'].get('driver_version', 'unknown')}, torch "
        f"{machine['torch']}; plain copies: {ceiling['d2h']:.1f} GB/s to the host, "
        f"{ceiling['h2d']:.1f} GB/s to the device"
    )
    return "\n".join(lines)
