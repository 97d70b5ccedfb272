"""Does the benchmark of the model host measure what it says, on the emulator?"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

BENCHMARKS = Path(__file__).parent.parent / "benchmarks"


def test_the_benchmark_writes_its_rows(tmp_path: Path) -> None:
    target = tmp_path / "host.json"
    words = ["--gib", "0.003", "--models", "3", "--fit", "1", "--cycles", "1", "--restart"]
    done = subprocess.run(
        [sys.executable, str(BENCHMARKS / "bench_host.py"), *words, "--json", str(target)],
        env={**os.environ, "CUMEM_DRIVER": "emulated", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    record = json.loads(target.read_text())
    assert list(record["seconds"]) == [
        "host: first use, built and loaded",
        "host: awake",
        "host: switch",
        "sleep, then wake",
        "reload from the file (in the page cache)",
        "restart of the process",
    ]
    assert all(record["seconds"].values())
    assert all(name in done.stdout for name in record["seconds"])
    assert "EMULATED DRIVER" in done.stdout
    # Each first use and each switch is a move; what is awake needs none.
    assert record["host"]["moves"] == record["host"]["hits"] == 2 * record["models"]
