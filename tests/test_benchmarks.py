"""Do the benchmarks run to the end and write what they measured?

On the emulator, with tiny sizes: no number matters here, only that it is there.
"""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

BENCHMARKS = Path(__file__).parent.parent / "benchmarks"
MIB = 1 << 20
GIB = 1 << 30

sys.path.append(str(BENCHMARKS))  # they are scripts, which import each other by name

plot = importlib.import_module("plot")
targets = importlib.import_module("targets")

STEPS = ("load", "sleep", "wake")

DRY_RUNS = {
    "bench_sleep.py": [
        *("--cycles", "1", "--rest", "0", "--processes", "1"),
        *("--scenarios", "many", "--many", "20", "--peer-scenarios", "many"),
        *("--adapters", "cumem", "tms"),
    ],
    "bench_switch.py": ["--gib", "0.01", "--slack", "0.02", "--cycles", "1", "--rest", "0"],
    "bench_stream_wake.py": ["--gib", "0.01", "--tokens", "8", "--cycles", "1"],
    "bench_load.py": [
        *("--gib", "0.01", "--loads", "2", "--folder", "/tmp", "--rest", "0"),
        *("--libraries", "cumem", "safetensors", "runai", "reads", "direct-reads"),
        *("--rings", "2,1,4", "2,8,4"),
    ],
    "profile_sleep.py": ["--gib", "0.01", "--rest", "0"],
}


@pytest.fixture(scope="module")
def dry_runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Every script at once, each as a process: name to (what it printed, its JSON)."""
    folder = tmp_path_factory.mktemp("results")
    environment = {
        **os.environ,
        "CUMEM_DRIVER": "emulated",
        "CUMEM_EMULATED_CAPACITY": str(256 * MIB),
        "OMP_NUM_THREADS": "1",
    }
    started = {
        script: subprocess.Popen(
            [sys.executable, str(BENCHMARKS / script), *words, "--json", str(folder / script)],
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for script, words in DRY_RUNS.items()
    }
    printed = {script: process.communicate(timeout=240) for script, process in started.items()}
    for script, process in started.items():
        assert process.returncode == 0, printed[script][1]
    return {
        script: (printed[script][0], json.loads((folder / script).read_text()))
        for script in DRY_RUNS
    }


def row_names(record: dict[str, Any]) -> list[str]:
    return [row["name"] for row in record["results"]["cumem"]["rows"]]


def test_sleep_benchmark_writes_its_rows_and_skips_a_missing_library(
    dry_runs: dict[str, Any],
) -> None:
    printed, record = dry_runs["bench_sleep.py"]
    assert row_names(record) == [
        *("sleep: small tensors, first", "wake:  small tensors, first"),
        *("sleep: small tensors", "wake:  small tensors"),
    ]
    assert list(record["missing"]) == ["tms"]
    assert record["missing"]["tms"].startswith("skipped: ")
    assert "EMULATED DRIVER" in printed
    assert {verdict["met"] for verdict in record["targets"]} == {None}
    assert record["command"][1] == "benchmarks/bench_sleep.py"
    assert not any("/" in word for word in record["command"][2:])


def test_switch_benchmark_writes_its_rows(dry_runs: dict[str, Any]) -> None:
    _, record = dry_runs["bench_switch.py"]
    assert row_names(record) == [
        *("switch: first", "switch: both dirty", "switch: leaving clean"),
        *("sleep, then wake: both dirty", "sleep, then wake: leaving clean"),
    ]
    rows = {row["name"]: row for row in record["results"]["cumem"]["rows"]}
    one = rows["switch: both dirty"]["live_bytes"] // 2
    assert rows["switch: both dirty"]["median_copied_bytes"] == 2 * one
    assert rows["switch: leaving clean"]["median_copied_bytes"] == one
    process = record["results"]["cumem"]["processes"][0]
    assert process["free_bytes_beside_one"] < 2 * one, "there was room for both models"


def test_loads_are_measured_and_checked(dry_runs: dict[str, Any]) -> None:
    printed, record = dry_runs["bench_load.py"]
    rows = record["results"]["cumem"]["rows"]
    ways = ("reload: sleep", "reload: wake", *(f"pinned file: {step}" for step in STEPS))
    assert list(rows) == ["first", "again", *ways]
    assert list(record["results"]["safetensors"]["rows"]) == ["first", "again"]
    assert list(record["results"]["reads"]["rows"]) == ["first", "again"]
    direct = record["results"]["direct-reads"]
    assert list(direct.get("rows", ())) == ["first", "again"] or "Errno" in direct["unavailable"]
    assert record["state"] == "warm"
    assert "runai" in record["results"]
    assert "EMULATED" in printed
    memory = record["results"]["cumem"]["memory"]
    assert 0 <= memory["device_bytes"] - memory["payload_bytes"] <= 2 * MIB
    assert memory["host_bytes"] <= GIB
    assert memory["pinned_file_bytes"] > memory["payload_bytes"]
    ring = record["results"]["cumem (2 threads, 1 of 4 MiB)"]
    assert (list(ring["rows"]), ring["memory"]["host_bytes"]) == (list(rows), 4 * MIB)
    assert "load_ring_bytes" in record["results"]["cumem (2 threads, 8 of 4 MiB)"]["unavailable"]


def test_stream_wake_benchmark_writes_its_rows(dry_runs: dict[str, Any]) -> None:
    _, record = dry_runs["bench_stream_wake.py"]
    ends = ("first layer", "whole forward", "all awake")
    assert row_names(record) == [
        *(f"forward, awake: {end}" for end in ends[:2]),
        *(f"{way}: {end}" for way in ("wake, then run", "stream_wake") for end in ends),
    ]


def test_profile_writes_the_phases(dry_runs: dict[str, Any]) -> None:
    printed, record = dry_runs["profile_sleep.py"]
    assert [item["name"] for item in record["profiles"]] == ["sleep", "wake"]
    assert all("copy" in item["phases"] for item in record["profiles"])
    assert "page faults" in printed


def test_plot_is_drawn_from_several_results(dry_runs: dict[str, Any], tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    records = [record for _, record in dry_runs.values() if "results" in record]
    plot.save_plot(records, tmp_path / "out.png")
    assert (tmp_path / "out.png").read_bytes().startswith(b"\x89PNG")


def test_every_target_and_bar_reads_a_row_that_exists(dry_runs: dict[str, Any]) -> None:
    _, switch = dry_runs["bench_switch.py"]
    assert {target.row for target in targets.SWITCH_TARGETS} <= set(row_names(switch))
    measured = {"weights, first", "weights, first after prepare", "small tensors", "KV, later"}
    measured |= {f"weights, {percent} % changed" for percent in (100, 1, 0)}
    rows = {f"{kind}{name}" for name in measured for kind in ("sleep: ", "wake:  ")}
    assert {target.row for target in targets.SLEEP_TARGETS} <= rows
    _, stream = dry_runs["bench_stream_wake.py"]
    named = {" ".join(row.split()) for row in (*rows, *row_names(switch), *row_names(stream))}
    assert set(plot.SHOWN) <= named
