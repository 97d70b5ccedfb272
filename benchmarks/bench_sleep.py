"""How long do sleep and wake of a model's weights and KV cache take?

    python benchmarks/bench_sleep.py --gib 16 --kv-gib 4 --json out.json

README.md beside this file says what each number means.
"""

from __future__ import annotations

import argparse
import json
import math
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

from adapters import ADAPTERS
from summary import summarise, table
from worker import Settings
from workload import FILLS

_WORKER = Path(__file__).with_name("worker.py")


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the benchmark; returns the exit status."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    chosen = _parser().parse_args(words)
    results = {name: _measure(chosen, name) for name in chosen.adapters}
    for result in results.values():
        print(table(result), end="\n\n")
    if chosen.json is not None:
        shown = [Path(word).name if "/" in word else word for word in words]
        command = ["python", "benchmarks/bench_sleep.py", *shown]
        record = {"command": command, "results": results}
        chosen.json.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    return 0


def _parser() -> argparse.ArgumentParser:
    default = Settings()
    parser = argparse.ArgumentParser(
        description="Time of sleep and wake of Llama-like bf16 weights and of a KV cache."
    )
    parser.add_argument("--gib", type=_size, default=default.gib, help="size of the weights")
    parser.add_argument("--kv-gib", type=_size, default=default.kv_gib, help="size of the KV cache")
    parser.add_argument("--kv-tensors", type=_count, default=default.kv_tensors)
    parser.add_argument(
        "--cycles", type=_count, default=default.cycles, help="samples of each row of later cycles"
    )
    parser.add_argument(
        "--processes", type=_count, default=1, help="fresh processes: samples of the first rows"
    )
    parser.add_argument(
        "--changed",
        type=_percents,
        default=default.changed,
        metavar="P,P,...",
        help="per cent of the weights' tensors that change between cycles (default: 100,1,0)",
    )
    parser.add_argument("--fill", choices=sorted(FILLS), default=default.fill)
    parser.add_argument(
        "--pretouch",
        type=_size,
        default=default.pretouch,
        metavar="GIB",
        help="host memory to touch and free before anything is measured",
    )
    parser.add_argument(
        "--rest",
        type=float,
        default=default.rest,
        metavar="SECONDS",
        help="between a sleep and its wake, but in the rows 'at once'",
    )
    parser.add_argument(
        "--adapters", nargs="+", choices=sorted(ADAPTERS), default=["cumem"], metavar="NAME"
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="where results go")
    return parser


def _size(text: str) -> float:
    value = float(text)
    if not math.isfinite(value) or value < 0:
        raise argparse.ArgumentTypeError(f"not a size in GiB: {text}")
    return value


def _count(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"not a positive number: {text}")
    return value


def _percents(text: str) -> tuple[int, ...]:
    values = tuple(int(part) for part in text.split(","))
    if not all(0 <= value <= 100 for value in values):
        raise argparse.ArgumentTypeError(f"not per cents: {text}")
    return values


def _measure(chosen: argparse.Namespace, adapter: str) -> dict[str, Any]:
    """One library, in fresh processes one after the other."""
    names = {field.name for field in fields(Settings)} - {"adapter"}
    settings = Settings(adapter=adapter, **{name: getattr(chosen, name) for name in names})
    processes = []
    for number in range(chosen.processes):
        print(f"{adapter}, process {number + 1} of {chosen.processes}", file=sys.stderr)
        processes.append(_in_process(settings))
    return summarise(processes)


def _in_process(settings: Settings) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        target = Path(folder) / "measured.json"
        command = [sys.executable, str(_WORKER), json.dumps(asdict(settings)), str(target)]
        if subprocess.run(command, check=False).returncode != 0:
            raise SystemExit(f"{settings.adapter}: its process failed; nothing was written")
        measured: dict[str, Any] = json.loads(target.read_text(encoding="utf-8"))
        return measured


if __name__ == "__main__":
    sys.exit(main())
