"""How long does a checkpoint take from a file to the device?

    python benchmarks/bench_load.py --gib 8 --json load.json
    python benchmarks/bench_load.py --libraries cumem --rings 15,4,128 12,4,128 15,16,512
    python benchmarks/bench_load.py --libraries reads cumem safetensors --cold --folder /var/tmp

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

from load_files import read_all, write_model
from processes import command_of, pretouch, say, write_json
from settings import GIB, MIB, add_json, add_pretouch, count, size
from tables import EMULATED, text_table

LIBRARIES = ("cumem", "safetensors", "fastsafetensors", "runai", "reads", "direct-reads")
_WORKER = Path(__file__).with_name("load_worker.py")
_SLOWEST = 1e8  # bytes a second: a library that is slower is given up


def ring(text: str) -> dict[str, int]:
    """Threads, and MiB of a buffer and of the ring, as options of cumem."""
    threads, buffer, total = (int(part) for part in text.split(","))
    return {
        "load_threads": threads,
        "load_buffer_bytes": buffer * MIB,
        "load_ring_bytes": total * MIB,
    }


def run_worker(
    library: str, path: Path, payload: int, options: dict[str, int], asked: argparse.Namespace
) -> dict[str, Any]:
    """One library in a process of its own."""
    result = path.with_suffix(".json")
    words = [sys.executable, str(_WORKER), library, str(path), str(asked.loads), str(result)]
    words += [json.dumps(options), state_of(asked), str(asked.rest)]
    limit = 180 + asked.loads * payload / _SLOWEST
    wanted = {"library": library, "options": options}
    try:
        done = subprocess.run(words, capture_output=True, text=True, timeout=limit, check=False)
    except subprocess.TimeoutExpired:
        return {**wanted, "unavailable": f"it took more than {limit:.0f} s"}
    if done.returncode != 0:
        last = (done.stderr.strip().splitlines() or ["no message"])[-1]
        return {**wanted, "unavailable": f"exit {done.returncode}: {last}"}
    return {**wanted, **json.loads(result.read_text(encoding="utf-8"))}


def state_of(asked: argparse.Namespace) -> str:
    return "cold" if asked.cold else "warm"


def label(options: dict[str, int]) -> str:
    mib = [options[name] // MIB for name in ("load_buffer_bytes", "load_ring_bytes")]
    return f"({options['load_threads']} threads, {mib[0]} of {mib[1]} MiB)"


def name_of(result: dict[str, Any]) -> str:
    options = result["options"]
    return f"{result['library']} {label(options)}" if options else str(result["library"])


def table(results: Sequence[dict[str, Any]], payload: int) -> str:
    lines = []
    for result in results:
        ceiling = result["ceiling_gb_per_s"]
        for row, samples in result["rows"].items():
            seconds = statistics.median(samples)
            rate = payload / seconds / 1e9
            moves = not row.endswith(": sleep")
            lines.append(
                (
                    f"{name_of(result)} {result['version']}: {row}",
                    str(len(samples)),
                    f"{seconds * 1e3:.1f}",
                    f"{rate:.1f}" if moves else "-",
                    f"{rate / ceiling:.0%}" if moves and ceiling else "-",
                )
            )
    return text_table(("load", "n", "median ms", "GB/s", "of a plain copy"), lines)


def shown(results: Sequence[dict[str, Any]], payload: int, folder: Path, state: str) -> str:
    """All results for people to read."""
    there = [result for result in results if "unavailable" not in result]
    lines = [f"{payload / GIB:.2f} GiB from {folder}, {state}", ""]
    if there and there[0]["environment"]["emulated"]:
        lines.insert(0, EMULATED)
    lines.append(table(there, payload))
    lines += [f"{name_of(r)}: {r['unavailable']}" for r in results if "unavailable" in r]
    for result in there:
        if memory := result["memory"]:
            more = memory["device_bytes"] - memory["payload_bytes"]
            lines.append(
                f"{name_of(result)}: device memory {more} bytes beside the payload, "
                f"host memory {memory['host_bytes'] / GIB:.2f} GiB"
            )
            if pinned := memory.get("pinned_file_bytes"):
                lines.append(f"{name_of(result)}: {pinned / GIB:.2f} GiB of the file pinned")
    return "\n".join(lines)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description="Time from a file to tensors on the device.")
    parser.add_argument("--gib", type=size, default=8.0, help="size of the checkpoint")
    parser.add_argument("--loads", type=count, default=3, help="loads in each process")
    parser.add_argument("--folder", type=Path, default=Path("/dev/shm"), help="for the file")
    parser.add_argument("--libraries", nargs="+", choices=LIBRARIES, default=list(LIBRARIES))
    parser.add_argument(
        "--rings",
        nargs="+",
        type=ring,
        default=[],
        metavar="THREADS,BUFFER,RING",
        help="also load with these numbers of threads and MiB of pinned memory",
    )
    parser.add_argument(
        "--cold", action="store_true", help="the system forgets the file before each load"
    )
    add_pretouch(parser)
    parser.add_argument(
        "--rest", type=size, default=0.3, metavar="SECONDS", help="before each load"
    )
    add_json(parser)
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the benchmark; returns the exit status."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    asked = _parser().parse_args(words)
    pretouch(asked.pretouch)
    with tempfile.TemporaryDirectory(dir=asked.folder, prefix="bench_load-") as name:
        folder = Path(name)
        path = folder / "model.safetensors"
        payload = write_model(path, int(asked.gib * GIB))
        if not asked.cold:  # whoever reads new pages first pays for them, with any library
            read_all(str(path))
        results = []
        for library in asked.libraries:
            say(f"{library} ...")
            results.append(run_worker(library, path, payload, {}, asked))
        for options in asked.rings:
            say(f"cumem {label(options)} ...")
            results.append(run_worker("cumem", path, payload, options, asked))
    print(shown(results, payload, asked.folder, state_of(asked)))
    record = {
        "benchmark": "load",
        "command": command_of("bench_load.py", words),
        "payload_bytes": payload,
        "state": state_of(asked),
        "results": {name_of(result): result for result in results},
    }
    write_json(asked.json, record)
    return 0 if "unavailable" not in results[0] else 1


if __name__ == "__main__":
    sys.exit(main())
