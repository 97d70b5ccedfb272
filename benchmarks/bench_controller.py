"""How long do requests take while an engine sleeps and wakes under load, and is one lost?

    python benchmarks/bench_controller.py --json controller.json

README.md beside this file says what each number means.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import sys
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

import torch
from controller_load import Load, LoadSettings, Outcome
from machine import describe
from processes import command_of, write_json
from settings import GIB, add_json, count, size
from tables import EMULATED, milliseconds, text_table
from workload import bytes_of, fill_random, llama_shapes

import cumem

_COLUMNS = ("row", "n", "p50 ms", "p99 ms", "max ms")


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the benchmark; exit status 1 when a request was lost or read wrong bytes."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    asked = _parser().parse_args(words)
    settings = LoadSettings(asked.requests, asked.clients, asked.cycles)
    device = cumem.default_device()
    tensors = _weights(int(asked.gib * GIB), device)
    outcome = asyncio.run(Load(tensors, settings).run())
    rows = _rows(outcome)
    print(_heading(settings, outcome, bytes_of(tensors), device), end="\n\n")
    print(text_table(_COLUMNS, [_line(row) for row in rows]), end="\n\n")
    print("\n".join(outcome.faults) or "No request was lost, none ran on sleeping memory.")
    record = {
        "benchmark": "controller",
        "command": command_of("bench_controller.py", words),
        "environment": describe(device),
        "settings": {**asdict(settings), "weight_bytes": bytes_of(tensors)},
        "served": len(outcome.served),
        "faults": outcome.faults,
        "seconds": outcome.seconds,
        "rows": rows,
    }
    write_json(asked.json, record)
    return 1 if outcome.faults else 0


def _weights(target: int, device: torch.device) -> list[torch.Tensor]:
    with cumem.use_memory_pool("weights"):
        tensors = [
            torch.empty(shape, dtype=torch.bfloat16, device=device)
            for shape in llama_shapes(target)
        ]
    fill_random(tensors)
    return tensors


def _rows(outcome: Outcome) -> list[dict[str, Any]]:
    latencies = {
        "request, memory awake": [
            item.ended - item.came for item in outcome.served if not item.waited
        ],
        "request, with a sleep or wake in between": [
            item.ended - item.came for item in outcome.served if item.waited
        ],
        "sleep, without its drain": outcome.sleeps,
        "wake": outcome.wakes,
    }
    return [_row(name, sorted(seconds)) for name, seconds in latencies.items()]


def _row(name: str, seconds: list[float]) -> dict[str, Any]:
    if not seconds:
        return {"name": name, "count": 0}
    cuts = statistics.quantiles(seconds, n=100, method="inclusive") if len(seconds) > 1 else []
    return {
        "name": name,
        "count": len(seconds),
        "p50_seconds": statistics.median(seconds),
        "p99_seconds": cuts[98] if cuts else seconds[0],
        "max_seconds": seconds[-1],
    }


def _line(row: dict[str, Any]) -> tuple[str, ...]:
    times = ("p50_seconds", "p99_seconds", "max_seconds")
    return (row["name"], str(row["count"]), *(milliseconds(row.get(name)) for name in times))


def _heading(
    settings: LoadSettings, outcome: Outcome, weight_bytes: int, device: torch.device
) -> str:
    lines = [
        f"{settings.requests} requests of {settings.clients} clients across {settings.cycles} "
        f"sleeps of {weight_bytes / GIB:.2f} GiB of weights, in {outcome.seconds:.1f} s"
    ]
    if device.type != "cuda":
        lines.append(EMULATED)
    return "\n".join(lines)


def _parser() -> argparse.ArgumentParser:
    default = LoadSettings()
    parser = argparse.ArgumentParser(description="Requests beside sleeps and wakes.")
    parser.add_argument("--requests", type=count, default=default.requests)
    parser.add_argument("--clients", type=count, default=default.clients)
    parser.add_argument("--cycles", type=count, default=default.cycles)
    parser.add_argument("--gib", type=size, default=4.0, help="size of the weights")
    add_json(parser)
    return parser


if __name__ == "__main__":
    sys.exit(main())
