"""Does the load test of the controller run to the end, and tell good from bad?"""

from __future__ import annotations

import importlib
import json
import sys
from pathlib import Path
from typing import Any

import pytest

from cumem.testing import emulated_driver

sys.path.append(str(Path(__file__).parent.parent / "benchmarks"))  # scripts import by name

bench = importlib.import_module("bench_controller")
load = importlib.import_module("controller_load")

ROWS = [
    "request, memory awake",
    "request, with a sleep or wake in between",
    "sleep, without its drain",
    "wake",
]


def run(folder: Path, *words: str) -> tuple[int, dict[str, Any]]:
    file = folder / "controller.json"
    with emulated_driver(capacity_bytes=256 << 20):
        status = bench.main(["--gib", "0.01", "--json", str(file), *words])
    return status, json.loads(file.read_text())


def test_a_run_says_how_long_requests_took(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    status, record = run(tmp_path, "--requests", "60", "--clients", "8", "--cycles", "3")
    printed = capsys.readouterr().out
    assert (status, record["served"], record["faults"]) == (0, 60, [])
    assert [row["name"] for row in record["rows"]] == ROWS
    requests = sum(row["count"] for row in record["rows"][:2])
    assert requests == 60
    for row in record["rows"][1:]:
        assert 0 < row["p50_seconds"] <= row["p99_seconds"] <= row["max_seconds"]
    assert "EMULATED DRIVER: no number here is a performance figure" in printed
    assert "No request was lost, none ran on sleeping memory." in printed


def test_a_run_that_lost_something_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(load.Load, "_read", lambda self, number: number != 3)
    status, record = run(tmp_path, "--requests", "8", "--clients", "2", "--cycles", "1")
    assert (status, record["faults"]) == (1, ["request 3 read wrong bytes"])
    assert "request 3 read wrong bytes" in capsys.readouterr().out
