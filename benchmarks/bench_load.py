"""How long does a checkpoint take from a file to the device?

    python benchmarks/bench_load.py --gib 8 --json load.json

README.md beside this file says what each number means.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from load_files import write_model
from processes import command_of, say, write_json
from settings import GIB, add_json, count, size
from tables import EMULATED, text_table

LIBRARIES = ("cumem", "safetensors", "fastsafetensors", "runai")
_WORKER = Path(__file__).with_name("load_worker.py")
_SLOWEST = 1e8  # bytes a second: a library that is slower is given up


def run_worker(library: str, path: Path, loads: int, folder: Path, payload: int) -> dict[str, Any]:
    """One library in a process of its own."""
    result = folder / f"{library}.json"
    words = [sys.executable, str(_WORKER), library, str(path), str(loads), str(result)]
    limit = 60 + loads * payload / _SLOWEST
    try:
        done = subprocess.run(words, capture_output=True, text=True, timeout=limit, check=False)
    except subprocess.TimeoutExpired:
        return {"library": library, "unavailable": f"it took more than {limit:.0f} s"}
    if done.returncode != 0:
        last = (done.stderr.strip().splitlines() or ["no message"])[-1]
        return {"library": library, "unavailable": f"exit {done.returncode}: {last}"}
    found: dict[str, Any] = json.loads(result.read_text(encoding="utf-8"))
    return found


def table(results: Sequence[dict[str, Any]], payload: int) -> str:
    lines = []
    for result in results:
        ceiling = result["ceiling_gb_per_s"]
        for row, samples in result["rows"].items():
            seconds = statistics.median(samples)
            rate = payload / seconds / 1e9
            moves = row != "reload: sleep"
            lines.append(
                (
                    f"{result['library']} {result['version']}: {row}",
                    str(len(samples)),
                    f"{seconds * 1e3:.1f}",
                    f"{rate:.1f}" if moves else "-",
                    f"{rate / ceiling:.0%}" if moves and ceiling else "-",
                )
            )
    return text_table(("load", "n", "median ms", "GB/s", "of a plain copy"), lines)


def shown(results: Sequence[dict[str, Any]], payload: int, folder: Path) -> str:
    """All results for people to read."""
    there = [result for result in results if "unavailable" not in result]
    lines = [f"{payload / GIB:.2f} GiB from {folder}", ""]
    if there and there[0]["environment"]["emulated"]:
        lines.insert(0, EMULATED)
    lines.append(table(there, payload))
    lines += [f"{r['library']}: {r['unavailable']}" for r in results if "unavailable" in r]
    for result in there:
        if memory := result["memory"]:
            more = memory["device_bytes"] - memory["payload_bytes"]
            lines.append(
                f"cumem: device memory {more} bytes beside the payload, "
                f"host memory {memory['host_bytes'] / GIB:.2f} GiB"
            )
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the benchmark; returns the exit status."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    parser = argparse.ArgumentParser(description="Time from a file to tensors on the device.")
    parser.add_argument("--gib", type=size, default=8.0, help="size of the checkpoint")
    parser.add_argument("--loads", type=count, default=3, help="loads in each process")
    parser.add_argument("--folder", type=Path, default=Path("/dev/shm"), help="for the file")
    parser.add_argument("--libraries", nargs="+", choices=LIBRARIES, default=list(LIBRARIES))
    add_json(parser)
    asked = parser.parse_args(words)
    with tempfile.TemporaryDirectory(dir=asked.folder, prefix="bench_load-") as name:
        folder = Path(name)
        path = folder / "model.safetensors"
        payload = write_model(path, int(asked.gib * GIB))
        results = []
        for library in asked.libraries:
            say(f"{library} ...")
            results.append(run_worker(library, path, asked.loads, folder, payload))
    print(shown(results, payload, asked.folder))
    record = {
        "benchmark": "load",
        "command": command_of("bench_load.py", words),
        "payload_bytes": payload,
        "results": {result["library"]: result for result in results},
    }
    write_json(asked.json, record)
    return 0 if "unavailable" not in results[0] else 1


if __name__ == "__main__":
    sys.exit(main())
