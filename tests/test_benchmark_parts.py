"""Do the parts of the benchmarks take, order, judge and show figures rightly?"""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from typing import Any

import pytest

from cumem.testing import emulated_driver

BENCHMARKS = Path(__file__).parent.parent / "benchmarks"
MIB = 1 << 20
GIB = 1 << 30

sys.path.append(str(BENCHMARKS))  # they are scripts, which import each other by name

adapters = importlib.import_module("adapters")
load_files = importlib.import_module("load_files")
measuring = importlib.import_module("measuring")
plot = importlib.import_module("plot")
processes = importlib.import_module("processes")
scenarios = importlib.import_module("scenarios")
settings = importlib.import_module("settings")
summary = importlib.import_module("summary")
targets = importlib.import_module("targets")
timeline = importlib.import_module("timeline")
worker = importlib.import_module("worker")
workload = importlib.import_module("workload")

# The plot


def test_plot_says_what_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plot, "find_spec", lambda name: None)
    with pytest.raises(SystemExit, match="pip install matplotlib"):
        plot.need_matplotlib()


def test_bars_have_each_library_and_the_best_plain_copy() -> None:
    row = {"name": "wake:  w", "median_seconds": 0.4}
    ours = {"results": {"cumem": {"rows": [{**row, "link_seconds": 0.2}]}}}
    theirs = {"results": {"tms": {"rows": [{**row, "link_seconds": 0.1}]}}}
    assert plot.groups_of([ours, theirs]) == []
    (group,) = plot.groups_of([ours, theirs], every=True)
    assert group == plot.Group("wake: w", {"cumem": 400, plot.LINK: 100, "tms": 400})


# One process


@pytest.mark.parametrize("scenario", scenarios.SCENARIOS)
def test_every_scenario_has_rows_and_checks(scenario: str) -> None:
    asked = settings.SleepSettings(
        scenario=scenario, gib=0.01, kv_gib=0.01, kv_tensors=4, many=20, cycles=2, rest=0.0
    )
    with emulated_driver(capacity_bytes=256 * MIB):
        found = worker.measure(adapters.CumemAdapter(), asked)
        result = summary.summarise([found])
    counts = {row["name"]: row["count"] for row in result["rows"]}
    assert all(name.startswith(("sleep: ", "wake:  ", "prepare: ")) for name in counts)
    expected = {
        "first": {"sleep: weights, first": 1},
        "prepared": {"prepare: weights": 1, "sleep: weights, first after prepare": 1},
        "later": {"sleep: weights, first": 1, "sleep: weights, 1 % changed": 2},
        "many": {"wake:  small tensors": 2},
        "kv": {"sleep: KV, later": 2, "wake:  KV, at once": 2},
        "both": {"wake:  both": 2},
    }
    assert expected[scenario].items() <= counts.items()


def test_row_takes_no_more_samples_than_it_has_time_for() -> None:
    taken: list[int] = []
    measuring.repeat(5, 0.0, lambda: taken.append(1))
    assert len(taken) == 1
    measuring.repeat(5, 60.0, lambda: taken.append(1))
    assert len(taken) == 6


def test_bytes_that_a_library_does_not_tell_stay_unknown() -> None:
    everything = adapters.Moved(adapters.EVERYTHING, {"x": 1.0})
    unknown, known = adapters.Moved(None), adapters.Moved(7)
    assert measuring.resolved(everything, 100) == measuring.Done(100, {"x": 1.0})
    assert measuring.added(unknown, everything, 100) == measuring.Done(None, {"in: x": 1.0})
    assert measuring.added(known, everything, 100).copied_bytes == 107


def test_small_tensors_are_the_same_each_time_and_in_range() -> None:
    shapes = workload.small_shapes(2000)
    assert shapes == workload.small_shapes(2000)
    sizes = [2 * count for (count,) in shapes]
    assert 1 << 10 <= min(sizes) < 1100
    assert 1_900_000 < max(sizes) <= 2 << 20
    assert all(size % 8 == 0 for size in sizes)


# The order of processes


def test_libraries_take_turns_at_coming_first() -> None:
    plan = list(processes.schedule(["cumem", "tms"], {"later": 1, "kv": 2}, ["later", "kv"]))
    assert plan == [
        *(("later", "cumem"), ("later", "tms")),
        *(("kv", "tms"), ("kv", "cumem")),
        *(("kv", "cumem"), ("kv", "tms")),
    ]


def test_peers_are_measured_where_asked_and_never_prepare() -> None:
    plan = list(processes.schedule(["cumem", "vllm"], {"prepared": 1, "first": 1}, ["prepared"]))
    assert plan == [("prepared", "cumem"), ("first", "cumem")]


# Targets


def result_of(*, emulated: bool = False, **figures: Any) -> dict[str, Any]:
    row = {
        "name": "sleep: w",
        "live_bytes": 16 * GIB,
        "offloaded_bytes": 16 * GIB,
        "median_seconds": 0.5,
        "median_cpu_seconds": 0.25,
        **figures,
    }
    return {"rows": [row], "processes": [{"environment": {"emulated": emulated}}]}


@pytest.mark.parametrize(
    ("measure", "wanted", "figures", "value", "met"),
    [
        ("speed", {"least": 30.0}, {}, 16 * GIB / 0.5 / 1e9, True),
        ("speed", {"least": 35.0}, {}, 16 * GIB / 0.5 / 1e9, False),
        ("share", {"least": 0.95}, {"link_seconds": 0.48}, 0.96, True),
        ("share", {"least": 0.95}, {}, None, None),
        ("time", {"most": 0.4, "live_gib": 16.0}, {}, 0.5, False),
        ("time", {"most": 0.6, "live_gib": 64.0}, {}, None, None),
        ("time per GiB", {"most": 0.7}, {"ms_per_gib": 0.7}, 0.7, True),
        ("host", {"most": 1.01}, {"host_per_live": 1.02}, 1.02, False),
        ("CPU", {}, {}, 0.5, None),
    ],
)
def test_target_is_judged_by_its_formula(
    measure: str, wanted: dict[str, float], figures: dict[str, Any], value: Any, met: Any
) -> None:
    target = targets.Target("t", "sleep: w", measure, **wanted)
    (verdict,) = targets.judged([target], result_of(**figures))
    assert (verdict.value, verdict.met) == (pytest.approx(value), met)


def test_target_without_a_row_or_on_the_emulator_is_not_judged() -> None:
    target = targets.Target("t", "sleep: other", "time", most=1.0)
    (verdict,) = targets.judged([target], result_of())
    assert (verdict.measured, verdict.met) == ("not measured", None)
    (verdict,) = targets.judged([target], result_of(emulated=True))
    assert (verdict.measured, verdict.met) == ("emulated", None)


# The profiler's trace


def test_trace_says_when_copies_ran_and_what_lay_between() -> None:
    def event(category: str, name: str, start: float, length: float, **args: Any) -> dict[str, Any]:
        return {"cat": category, "name": name, "ts": start, "dur": length, "args": args}

    events = [
        event("user_annotation", "sleep", 1000, 10_000),
        event("gpu_memcpy", "Memcpy DtoH (Device -> Pinned)", 3000, 2000, bytes=10),
        event("gpu_memcpy", "Memcpy DtoH (Device -> Pinned)", 4000, 2000, bytes=10),
        event("gpu_memcpy", "Memcpy DtoH (Device -> Pinned)", 7000, 1000, bytes=10),
        event("gpu_memcpy", "Memcpy DtoH (Device -> Pinned)", 90_000, 1000, bytes=10),
        event("cuda_runtime", "cudaDeviceSynchronize", 8000, 500),
    ]
    within = timeline.span_of(events, "sleep")
    assert timeline.activities(events, within) == [
        timeline.Activity("copy to the host", 3, 30, 4.0, 2.0, 7.0, 1.0, 1.0)
    ]
    assert timeline.calls(events, within) == [timeline.Call("cudaDeviceSynchronize", 1, 0.5)]


# The file that loads are measured with


def test_a_file_that_stays_in_memory_is_not_called_cold(tmp_path: Path) -> None:
    shared = Path("/dev/shm")
    if not shared.is_dir():
        pytest.skip("no file system in memory")
    path = shared / f"cumem-test-{tmp_path.name}"
    path.write_bytes(b"x" * 5000)
    try:
        load_files.read_all(str(path))
        with pytest.raises(SystemExit, match="stays in memory"):
            load_files.evict(str(path))
    finally:
        path.unlink()
