"""Does the short run ask for the whole table of targets, in words that the scripts know?"""

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

sys.path.append(str(BENCHMARKS))  # they are scripts, which import each other by name

SCRIPTS = {name: importlib.import_module(name) for name in ("bench_sleep", "bench_switch")}

# Stands in for Python: tells what it was asked to run, and fails at one of the scripts.
RECORDER = """\
#!{python}
import json, os, sys
print(json.dumps(sys.argv[1:]))
sys.exit(3 if os.environ["FAILS_AT"] in sys.argv[1] else 0)
"""


def run(folder: Path, fails_at: str) -> subprocess.CompletedProcess[str]:
    recorder = folder / "recorder"
    recorder.write_text(RECORDER.format(python=sys.executable))
    recorder.chmod(0o755)
    environment = {**os.environ, "PYTHON": str(recorder), "FAILS_AT": fails_at}
    command = [str(BENCHMARKS / "run_short.sh"), str(folder / "results")]
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=False)


def asked(folder: Path, name: str) -> Any:
    """What the script was asked for, as it would understand it."""
    words = json.loads((folder / "results" / f"{name}.txt").read_text())
    script = Path(words[0])
    assert script.parent.resolve() == BENCHMARKS
    return SCRIPTS[script.stem]._parser().parse_args(words[1:])


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    assert run(tmp_path, "nowhere").returncode == 0
    return tmp_path


def test_every_scenario_that_a_target_needs_is_asked_for(folder: Path) -> None:
    sleep = asked(folder, "sleep")
    assert {"later", "prepared", "many", "kv"} <= set(sleep.scenarios)
    assert {100, 1, 0} <= set(sleep.changed)
    assert (sleep.gib, sleep.kv_gib, sleep.kv_tensors, sleep.many) == (16, 64, 64, 10_000)
    large = asked(folder, "large")
    assert (large.gib, large.changed, large.scenarios) == (64, (0,), ["later"])
    assert asked(folder, "switch").gib == 16
    results = [asked(folder, name).json for name in ("sleep", "large", "switch")]
    assert [file.name for file in results] == ["sleep.json", "large.json", "switch.json"]


def test_a_script_that_fails_stops_no_other_and_is_told(tmp_path: Path) -> None:
    done = run(tmp_path, "bench_switch")
    assert done.returncode == 3
    assert len(done.stdout.splitlines()) == 3
    assert asked(tmp_path, "large").gib == 64


def test_it_must_be_told_where_results_go() -> None:
    done = subprocess.run(
        [str(BENCHMARKS / "run_short.sh")], capture_output=True, text=True, check=False
    )
    assert done.returncode != 0
    assert "where do the results go?" in done.stderr
