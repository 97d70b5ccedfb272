"""How do results look to people?"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from settings import GIB

EMULATED = "EMULATED DRIVER: no number here is a performance figure"

_COLUMNS = (
    *("row", "n", "median ms", "min", "max", "CPU ms"),
    *("copied GiB", "GB/s", "of copy", "ms/GiB", "freed GiB", "host GiB", "host/live"),
)


def text_table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Columns of text: the first to the left, the others to the right."""
    lines = [tuple(header), *(tuple(row) for row in rows)]
    widths = [max(len(line[column]) for line in lines) for column in range(len(header))]
    text = [
        "  ".join(
            cell.ljust(width) if column == 0 else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(line, widths, strict=True))
        ).rstrip()
        for line in lines
    ]
    return "\n".join([text[0], "-" * (sum(widths) + 2 * (len(widths) - 1)), *text[1:]])


def rows_table(result: Mapping[str, Any]) -> str:
    """One library's summary, with its heading and what the driver's scrub takes."""
    body = text_table(_COLUMNS, [_line(row) for row in result["rows"]])
    notes = [
        f"scrub wait, {what}: a wake at once takes {seconds * 1e3:+.1f} ms beside one after a rest"
        for what, seconds in result.get("scrub_wait_seconds", {}).items()
    ]
    return "\n".join([heading(result), "", body, *notes])


def beside_table(original: Mapping[str, Any], drop_in: Mapping[str, Any]) -> str:
    """The medians of a library and of its drop-in, row by row, where both have the row."""
    names = [result["processes"][0]["adapter"]["name"] for result in (original, drop_in)]
    theirs = {row["name"]: row["median_seconds"] for row in original["rows"]}
    lines = [
        (row["name"], milliseconds(before), milliseconds(now), f"{before / now:.2f}")
        for row in drop_in["rows"]
        if (before := theirs.get(row["name"])) and (now := row["median_seconds"])
    ]
    return text_table(("row", *(f"{name} ms" for name in names), "times as fast"), lines)


def heading(result: Mapping[str, Any]) -> str:
    """Which library, how much, on what machine."""
    processes = result["processes"]
    adapter, machine = processes[0]["adapter"], processes[0]["environment"]
    sizes = {_size_line(process): None for process in processes}
    lines = [f"{adapter['name']} {adapter['version']}, {len(processes)} process(es)"]
    lines += [f"  {line}" for line in sizes]
    if machine["emulated"]:
        return "\n".join([*lines, EMULATED])
    ceiling = result["ceiling_gb_per_s"]
    both = f", {ceiling['both']:.1f} GB/s both at once" if "both" in ceiling else ""
    lines.append(
        f"{machine['gpu']}, driver {machine['link'].get('driver_version', 'unknown')}, torch "
        f"{machine['torch']}; plain copies: {ceiling['d2h']:.1f} GB/s to the host, "
        f"{ceiling['h2d']:.1f} GB/s to the device{both}"
    )
    return "\n".join(lines)


def _size_line(process: Mapping[str, Any]) -> str:
    held = (("weights", "weights"), ("kv", "KV"))
    parts = [
        f"{process[f'{key}_bytes'] / GIB:.2f} GiB of {name} in {tensors} tensors"
        for key, name in held
        if (tensors := process.get(f"{key}_tensors"))
    ]
    return ", ".join(parts)


def _line(row: Mapping[str, Any]) -> tuple[str, ...]:
    times = ("median_seconds", "min_seconds", "max_seconds", "median_cpu_seconds")
    return (
        row["name"],
        str(row["count"]),
        *(milliseconds(row[name]) for name in times),
        _gib(row["median_copied_bytes"]),
        f"{row['gb_per_s']:.1f}" if "gb_per_s" in row else "-",
        f"{row['of_ceiling'] * 100:.1f} %" if "of_ceiling" in row else "-",
        f"{row['ms_per_gib']:.2f}" if "ms_per_gib" in row else "-",
        _gib(row["median_freed_bytes_seen_outside"]),
        _gib(row["held_bytes"]),
        f"{row['host_per_live']:.3f}" if "host_per_live" in row else "-",
    )


def milliseconds(seconds: float | None) -> str:
    return "-" if seconds is None else f"{seconds * 1e3:.1f}"


def _gib(count: float | None) -> str:
    return f"{count / GIB:.2f}" if count else "-"
