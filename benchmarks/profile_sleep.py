"""Where does the time of one sleep and one wake go?

    python benchmarks/profile_sleep.py --gib 16 --changed 100

Runs them under torch's profiler and prints the phases that the library reports, what
the device did and when, calls into CUDA, and what the host paid. Times are a little
longer than without the profiler: look at proportions.
"""

from __future__ import annotations

import argparse
import resource
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import timeline
import torch
import workload
from adapters import WEIGHTS
from machine import describe, synchronize
from processes import command_of, say, write_json
from settings import FILL_NAMES, GIB, add_json, percent, size
from tables import EMULATED, text_table
from torch.profiler import ProfilerActivity, profile, record_function

import cumem

_MOST_CALLS = 12
_USAGE = {
    "user seconds": "ru_utime",
    "system seconds": "ru_stime",
    "page faults without reading": "ru_minflt",
    "page faults with reading": "ru_majflt",
    "waits": "ru_nvcsw",
    "interruptions": "ru_nivcsw",
}


@dataclass(frozen=True)
class Profile:
    """One call: what it says of itself, and what it looked like from outside."""

    name: str
    report: str
    seconds: float
    phases: Mapping[str, float]
    usage: Mapping[str, float]
    activities: list[timeline.Activity]
    calls: list[timeline.Call]


def build(target_bytes: int, fill: str) -> list[torch.Tensor]:
    """The weights, in a pool."""
    device = cumem.default_device()
    with cumem.use_memory_pool(WEIGHTS):
        weights = [
            torch.empty(shape, dtype=torch.bfloat16, device=device)
            for shape in workload.llama_shapes(target_bytes)
        ]
    workload.FILLS[fill](weights)
    synchronize(device)
    return weights


def profiled(name: str, call: Callable[[], Any], trace: Path | None) -> Profile:
    """Runs the call under the profiler; ``trace``: where to keep what it recorded."""
    device = cumem.default_device()
    synchronize(device)
    with profile(activities=_activities(device)) as recorder:
        before = _usage()
        with record_function(name):
            report = call()
            synchronize(device)
        after = _usage()
    with tempfile.TemporaryDirectory() as folder:
        file = trace or Path(folder) / "trace.json"
        recorder.export_chrome_trace(str(file))
        events = timeline.load(file)
    within = timeline.span_of(events, name)
    return Profile(
        name=name,
        report=str(report),
        seconds=report.seconds,
        phases=dict(report.phases),
        usage={what: after[what] - before[what] for what in after},
        activities=timeline.activities(events, within),
        calls=timeline.calls(events, within)[:_MOST_CALLS],
    )


def _activities(device: torch.device) -> list[ProfilerActivity]:
    chosen = [ProfilerActivity.CPU]
    return [*chosen, ProfilerActivity.CUDA] if device.type == "cuda" else chosen


def _usage() -> dict[str, float]:
    now = resource.getrusage(resource.RUSAGE_SELF)
    return {what: float(getattr(now, name)) for what, name in _USAGE.items()}


def shown(item: Profile) -> str:
    """One call for people to read."""
    parts = [item.report, "", _phases(item)]
    parts += ["", _device(item) if item.activities else "no device activity was recorded"]
    if item.calls:
        lines = [(call.name, str(call.count), f"{call.milliseconds:.2f}") for call in item.calls]
        parts += ["", text_table(("call into CUDA", "n", "ms"), lines)]
    parts += ["", "host: " + ", ".join(f"{value:g} {what}" for what, value in item.usage.items())]
    return "\n".join(parts)


def _phases(item: Profile) -> str:
    lines = [
        (phase, f"{seconds * 1e3:.2f}", f"{seconds / item.seconds * 100:.1f} %")
        for phase, seconds in item.phases.items()
    ]
    return text_table(("phase", "ms", "of the call"), lines)


def _device(item: Profile) -> str:
    """When each kind of work began and ended: what is before, between and after is not it."""
    header = ("on the device", "n", "GiB", "busy ms", "GB/s", "from", "to", "idle", "longest gap")
    lines = [
        (
            work.kind,
            str(work.count),
            f"{work.bytes / GIB:.3f}" if work.bytes else "-",
            f"{work.busy:.2f}",
            f"{work.bytes / work.busy / 1e6:.1f}" if work.bytes and work.busy else "-",
            *(f"{at:.2f}" for at in (work.starts, work.ends, work.idle, work.longest_gap)),
        )
        for work in item.activities
    ]
    return text_table(header, lines)


def _run(asked: argparse.Namespace) -> list[Profile]:
    weights = build(int(asked.gib * GIB), asked.fill)
    synchronize(cumem.default_device())
    with profile(activities=_activities(cumem.default_device())):
        workload.checksums(weights[:2])  # the profiler starts here, not in what is measured
    if not asked.first:
        say("a first sleep and wake, not profiled")
        cumem.sleep(tags=[WEIGHTS])
        cumem.wake_up([WEIGHTS])
        workload.change(weights, asked.changed, 1)
    before = workload.checksums(weights)
    traces = [None, None]
    if asked.trace is not None:
        asked.trace.mkdir(parents=True, exist_ok=True)
        traces = [asked.trace / f"{name}.json" for name in ("sleep", "wake")]
    say("sleep")
    slept = profiled("sleep", lambda: cumem.sleep(tags=[WEIGHTS]), traces[0])
    time.sleep(asked.rest)
    say("wake")
    woken = profiled("wake", lambda: cumem.wake_up([WEIGHTS]), traces[1])
    if workload.checksums(weights) != before:
        raise SystemExit("contents changed")
    return [slept, woken]


def main(arguments: Sequence[str] | None = None) -> int:
    """Profiles; returns the exit status."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    asked = _parser().parse_args(words)
    profiles = _run(asked)
    machine = describe(cumem.default_device())
    if machine["emulated"]:
        print(EMULATED, end="\n\n")
    for item in profiles:
        print(shown(item), end="\n\n")
    record = {
        "benchmark": "profile",
        "command": command_of("profile_sleep.py", words),
        "environment": machine,
        "profiles": [asdict(item) for item in profiles],
    }
    write_json(asked.json, record)
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description="Where the time of one sleep and one wake goes.")
    parser.add_argument("--gib", type=size, default=16.0, help="size of the weights")
    parser.add_argument("--first", action="store_true", help="the first sleep of the process")
    parser.add_argument(
        "--changed",
        type=percent,
        default=100,
        metavar="P",
        help="per cent of the tensors that change before a later sleep",
    )
    parser.add_argument("--fill", choices=FILL_NAMES, default="random")
    parser.add_argument("--rest", type=size, default=0.5, metavar="SECONDS")
    parser.add_argument("--trace", type=Path, metavar="FOLDER", help="keep the traces there")
    add_json(parser)
    return parser


if __name__ == "__main__":
    sys.exit(main())
