"""What is this library to reach, and did it, in this run?

The one place where targets are kept. They are for one H200; shares are of the plain
copies of the same run.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from settings import GIB
from tables import EMULATED, text_table

Row = Mapping[str, Any]

_TOLERANCE = 0.05  # of a size that a target is for


@dataclass(frozen=True)
class Measure:
    """A figure of a row: how it is computed and how it is written.

    Attributes:
        formula: what ``value`` does, in words.
        value: from the row's summary; None: it is not there.
        unit: after the figure.
        factor: from the value to the figure that people read.
    """

    formula: str
    value: Callable[[Row], float | None]
    unit: str
    factor: float = 1.0

    def text(self, value: float) -> str:
        return f"{value * self.factor:.4g}{self.unit}"


def _share_of_link(row: Row) -> float | None:
    link = row.get("link_seconds")
    return None if link is None else link / row["median_seconds"]


MEASURES = {
    "speed": Measure(
        "live bytes that come back / median seconds / 1e9",
        lambda row: row["offloaded_bytes"] / row["median_seconds"] / 1e9,
        " GB/s",
    ),
    "share": Measure(
        "seconds of plain copies of the live bytes / median seconds", _share_of_link, " %", 100.0
    ),
    "time": Measure("median seconds", lambda row: row["median_seconds"], " ms", 1e3),
    "time per GiB": Measure(
        "median milliseconds / live GiB", lambda row: row.get("ms_per_gib"), " ms/GiB"
    ),
    "host": Measure(
        "host memory held / live bytes that come back", lambda row: row.get("host_per_live"), ""
    ),
    "CPU": Measure(
        "processor seconds of all threads / median seconds",
        lambda row: row["median_cpu_seconds"] / row["median_seconds"],
        " of one core",
    ),
}


@dataclass(frozen=True)
class Target:
    """One figure of one row, and what it is to be.

    Attributes:
        name: of the target.
        row: the row that it is read from.
        measure: a name in ``MEASURES``.
        least, most: what is wanted; neither: it is only reported.
        live_gib: the size that it is for; None: any.
    """

    name: str
    row: str
    measure: str
    least: float | None = None
    most: float | None = None
    live_gib: float | None = None

    @property
    def wanted(self) -> str:
        text = MEASURES[self.measure].text
        if self.least is not None:
            return f">= {text(self.least)}"
        return f"<= {text(self.most)}" if self.most is not None else "reported"

    def met(self, value: float) -> bool | None:
        if self.least is not None:
            return value >= self.least
        return value <= self.most if self.most is not None else None


SLEEP_TARGETS = (
    Target("first sleep, never prepared", "sleep: weights, first", "speed", least=30.0),
    Target(
        "first sleep after prepare()", "sleep: weights, first after prepare", "share", least=0.95
    ),
    Target("later sleep, every byte changed", "sleep: weights, 100 % changed", "share", least=0.95),
    Target(
        "later sleep, nothing changed, 16 GiB",
        *("sleep: weights, 0 % changed", "time"),
        most=0.030,
        live_gib=16.0,
    ),
    Target(
        "later sleep, nothing changed, 64 GiB",
        *("sleep: weights, 0 % changed", "time"),
        most=0.080,
        live_gib=64.0,
    ),
    Target(
        "later sleep, 1 % of tensors changed, 16 GiB",
        *("sleep: weights, 1 % changed", "time"),
        most=0.045,
        live_gib=16.0,
    ),
    Target("wake", "wake:  weights, 100 % changed", "share", least=0.98),
    Target("wake, small tensors", "wake:  small tensors", "share", least=0.85),
    Target("discard of 64 GiB KV", "sleep: KV, later", "time per GiB", most=0.7, live_gib=64.0),
    Target(
        "wake of 64 GiB KV after a rest",
        "wake:  KV, later",
        "time per GiB",
        most=1.0,
        live_gib=64.0,
    ),
    Target("host bytes per live byte", "sleep: weights, 100 % changed", "host", most=1.01),
    Target("CPU of a later sleep", "sleep: weights, 100 % changed", "CPU"),
    Target("CPU of a wake", "wake:  weights, 100 % changed", "CPU"),
)

SWITCH_TARGETS = (
    Target(
        "switch, both dirty, 16 GiB each",
        *("switch: both dirty", "time"),
        most=0.40,
        live_gib=32.0,
    ),
    Target(
        "switch, leaving clean, 16 GiB each",
        *("switch: leaving clean", "time"),
        most=0.32,
        live_gib=32.0,
    ),
    Target("host bytes per live byte", "switch: both dirty", "host", most=1.01),
    Target("CPU of a switch", "switch: both dirty", "CPU"),
)


@dataclass(frozen=True)
class Verdict:
    """A target beside what one run measured; ``met`` None: not a question, or not measured."""

    name: str
    wanted: str
    measured: str
    met: bool | None
    value: float | None
    row: str
    formula: str


def judged(targets: Sequence[Target], result: Mapping[str, Any]) -> list[Verdict]:
    """The targets beside this library's rows of this run alone."""
    rows = {row["name"]: row for row in result["rows"]}
    emulated = bool(result["processes"][0]["environment"]["emulated"])
    return [_verdict(target, rows.get(target.row), emulated=emulated) for target in targets]


def _verdict(target: Target, row: Row | None, *, emulated: bool) -> Verdict:
    measure = MEASURES[target.measure]
    why = _why_not(target, row, emulated=emulated)
    value = measure.value(row) if row is not None and not why else None
    text = measure.text(value) if value is not None else why or "not known"
    met = target.met(value) if value is not None else None
    return Verdict(target.name, target.wanted, text, met, value, target.row, measure.formula)


def _why_not(target: Target, row: Row | None, *, emulated: bool) -> str:
    """Why the row says nothing about the target; empty when it does."""
    if emulated:
        return "emulated"
    if row is None:
        return "not measured"
    live = row["live_bytes"] / GIB
    fits = target.live_gib is None or abs(live / target.live_gib - 1) <= _TOLERANCE
    return "" if fits else f"not at {live:.3g} GiB"


def targets_table(verdicts: Sequence[Verdict]) -> str:
    """The block for people to read."""
    words = {True: "yes", False: "NO", None: "-"}
    rows = [(item.name, item.wanted, item.measured, words[item.met]) for item in verdicts]
    note = [EMULATED] if any(item.measured == "emulated" for item in verdicts) else []
    return "\n".join(["targets", *note, text_table(("target", "wanted", "measured", "met"), rows)])


def as_records(verdicts: Sequence[Verdict]) -> list[dict[str, Any]]:
    return [asdict(item) for item in verdicts]
