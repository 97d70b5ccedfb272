"""How do the libraries and plain copies compare, at a glance?

    python benchmarks/plot.py sleep.json switch.json --output out.png

Bars for each operation: each library's median, and what plain copies of the same
bytes take. ``--plot out.png`` of the benchmarks does the same at their end.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from textwrap import fill
from typing import Any

LINK = "plain copies"

_MISSING = "a plot needs matplotlib, which is not installed: pip install matplotlib"
_COLOURS = {
    "cumem": "#1b6ca8",
    "cumem-as-tms": "#5b9bd0",
    "cumem-as-tms-retained": "#2f8f9d",
    "cumem-as-vllm": "#8db3e2",
    "tms": "#e0a458",
    "tms-retained": "#b5651d",
    "vllm": "#7a5195",
    LINK: "#b8b8b8",
}
_OTHER = "#666666"
_LINE = 130  # characters

# The operations that say most; --all draws every row.
SHOWN = (
    *("sleep: weights, first", "sleep: weights, first after prepare"),
    *(f"sleep: weights, {percent} % changed" for percent in (100, 1, 0)),
    *("wake: weights, 100 % changed", "wake: small tensors"),
    *("sleep: KV, later", "wake: KV, later"),
    *("switch: both dirty", "sleep, then wake: both dirty"),
    *("switch: leaving clean", "sleep, then wake: leaving clean"),
    *("wake, then run: first layer", "stream_wake: first layer"),
    *("wake, then run: whole forward", "stream_wake: whole forward"),
)


@dataclass
class Group:
    """One operation: milliseconds by library, and by plain copies where bytes are copied."""

    title: str
    bars: dict[str, float] = field(default_factory=dict)


def groups_of(records: Sequence[Mapping[str, Any]], *, every: bool = False) -> list[Group]:
    """The operations of these results, in order: those of ``SHOWN``, or every one."""
    groups: dict[str, Group] = {}
    for record in records:
        for library, result in record["results"].items():
            for row in result["rows"]:
                title = " ".join(row["name"].split())
                bars = groups.setdefault(title, Group(title)).bars
                bars[library] = row["median_seconds"] * 1e3
                if "link_seconds" in row:
                    best = bars.get(LINK, float("inf"))
                    bars[LINK] = min(best, row["link_seconds"] * 1e3)
    if every:
        return list(groups.values())
    return [groups[title] for title in SHOWN if title in groups]


def need_matplotlib() -> None:
    """Says so at once, not after minutes of measuring.

    Raises:
        SystemExit: it is not installed.
    """
    if find_spec("matplotlib") is None:
        raise SystemExit(_MISSING)


def save_plot(records: Sequence[Mapping[str, Any]], file: Path, *, every: bool = False) -> None:
    """Draws the operations of these results into a picture."""
    need_matplotlib()
    import_module("matplotlib").use("Agg")  # no window
    pyplot = import_module("matplotlib.pyplot")
    groups = groups_of(records, every=every) or groups_of(records, every=True)
    libraries = _order(groups)
    height = 1.2 + sum(0.24 * len(group.bars) + 0.22 for group in groups)
    figure, axes = pyplot.subplots(figsize=(9, height), layout="constrained")
    ticks = _draw(axes, groups)
    axes.set_yticks(ticks, [group.title for group in groups])
    axes.invert_yaxis()
    axes.margins(y=0.01)
    axes.set_xscale("log")
    values = [value for group in groups for value in group.bars.values()]
    axes.set_xlim(min(values) / 3, max(values) * 1.6)  # room for the figure beside the bar
    axes.set_xlabel("milliseconds, median; logarithmic; less is better")
    axes.spines[["top", "right"]].set_visible(False)
    handles = [pyplot.Rectangle((0, 0), 1, 1, color=_colour(name)) for name in libraries]
    figure.legend(handles, libraries, loc="outside upper center", ncols=5, frameon=False)
    figure.supxlabel(_caption(records), fontsize=7, color="#555555")
    figure.savefig(file, dpi=150)
    pyplot.close(figure)


def _draw(axes: Any, groups: Sequence[Group]) -> list[float]:
    """Bars from the top down; returns the middle of each group."""
    ticks, at = [], 0.0
    for group in groups:
        names = _order([group])
        for place, name in enumerate(names):
            value = group.bars[name]
            axes.barh(at + place, value, height=0.85, color=_colour(name))
            axes.text(value * 1.05, at + place, _figure(value), va="center", fontsize=7)
        ticks.append(at + (len(names) - 1) / 2)
        at += len(names) + 0.9
    return ticks


def _figure(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def _order(groups: Sequence[Group]) -> list[str]:
    """Libraries by name, ours first, plain copies last."""
    names = {name for group in groups for name in group.bars}
    return sorted(names, key=lambda name: (name == LINK, name != "cumem", name))


def _colour(name: str) -> str:
    return _COLOURS.get(name, _OTHER)


def _caption(records: Sequence[Mapping[str, Any]]) -> str:
    result = next(iter(records[0]["results"].values()))
    machine = result["processes"][0]["environment"]
    where = "emulated driver: no figure here means anything"
    if not machine["emulated"]:
        where = f"{machine['gpu']}, torch {machine['torch']}"
    return "\n".join([where, *(fill(" ".join(item["command"]), _LINE) for item in records)])


def main(arguments: Sequence[str] | None = None) -> int:
    """Draws results that were measured before; returns the exit status."""
    parser = argparse.ArgumentParser(description="A picture of results of the benchmarks.")
    parser.add_argument("results", nargs="+", type=Path, metavar="FILE", help="JSON of a benchmark")
    parser.add_argument("--output", type=Path, required=True, metavar="FILE")
    parser.add_argument("--all", action="store_true", help="every row, not only the main ones")
    asked = parser.parse_args(arguments)
    need_matplotlib()
    records = [json.loads(file.read_text(encoding="utf-8")) for file in asked.results]
    save_plot(records, asked.output, every=asked.all)
    return 0


if __name__ == "__main__":
    sys.exit(main())
