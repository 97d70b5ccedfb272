"""How long does a request wait for a model that sleeps, where not all models fit?

    python benchmarks/bench_host.py --gib 4 --models 3 --fit 1 --json host.json

README.md beside this file says what each number means. One process; with ``--restart``
also one fresh process for each sample of that row.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from machine import describe, synchronize
from processes import command_of, say, write_json
from safetensors.torch import load_file, save_file
from settings import GIB, add_json, count, size
from tables import EMULATED

import cumem
from cumem.serving import ModelHost

_LAYERS = 16
_SIZING = "sizing"


class Model(torch.nn.Module):
    """Square layers of bf16, one after the other, with a norm between."""

    def __init__(self, width: int, device: torch.device) -> None:
        super().__init__()
        shape = {"device": device, "dtype": torch.bfloat16}
        self.layers = torch.nn.ModuleList(
            torch.nn.Linear(width, width, bias=False, **shape) for _ in range(_LAYERS)
        )
        self.requires_grad_(requires_grad=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = torch.nn.functional.rms_norm(x + layer(x), x.shape[-1:])
        return x


class Bench:
    """Models with checkpoints, and the ways in which one of them can come."""

    def __init__(self, asked: argparse.Namespace, folder: Path) -> None:
        self.device = cumem.default_device()
        self.width = max(64, int((asked.gib * GIB / 2 / _LAYERS) ** 0.5) // 64 * 64)
        self.model_bytes = 2 * _LAYERS * self.width**2
        self.names = [f"model_{index}" for index in range(asked.models)]
        self.files = {name: folder / f"{name}.safetensors" for name in self.names}
        self.budget = asked.fit * self._segment_bytes()
        self.x = torch.ones(8, self.width, dtype=torch.bfloat16, device=self.device)
        self.answers: dict[str, torch.Tensor] = {}
        self.rows: dict[str, list[float]] = {}

    def build(self) -> Model:
        return Model(self.width, self.device)

    def _segment_bytes(self) -> int:
        """What one model takes in a pool: segments are a little larger than what is in them."""
        with cumem.use_memory_pool(_SIZING):
            model = self.build()
        (taken,) = (tag.segment_bytes for tag in cumem.stats().tags if tag.tag == _SIZING)
        del model
        cumem.trim(_SIZING)
        return taken

    def write(self) -> None:
        """Checkpoints of random weights, the same at each run, and what each answers."""
        for seed, name in enumerate(self.names):
            torch.manual_seed(seed)
            model = self.build()
            for parameter in model.parameters():
                parameter.normal_(0.0, 0.02)
            self.answers[name] = model(self.x).cpu()
            weights = {key: value.cpu() for key, value in model.state_dict().items()}
            save_file(weights, self.files[name])
            del model, weights

    def first_answer(self, name: str, model: Model, started: float, row: str) -> None:
        """Books the seconds from the request to its answer, which must be the right one."""
        answer = model(self.x)
        synchronize(self.device)
        self.rows.setdefault(row, []).append(time.perf_counter() - started)
        if not torch.allclose(answer.cpu(), self.answers[name], rtol=0.02, atol=0.02):
            raise SystemExit(f"{row}: {name} answers wrongly")

    async def hosted(self, cycles: int, seconds: float) -> Any:
        """Requests in turn for each model; each must wait for a move."""
        async with ModelHost(self.budget) as host:
            for name in self.names:
                host.add(name, self.build, self.files[name])
            for turn in range(1 + cycles):
                row = "host: first use, built and loaded" if turn == 0 else "host: switch"
                for name in self.names:
                    await self._use(host, name, row)
                    await self._use(host, name, "host: awake")
                if sum(self.rows.get("host: switch", [])) > seconds:
                    break
            status = host.status()
            say(str(status))
        return {"moves": status.moves, "hits": status.hits, "move_seconds": status.move_seconds}

    async def _use(self, host: ModelHost, name: str, row: str) -> None:
        started = time.perf_counter()
        async with host.use(name) as model:
            self.first_answer(name, model, started, row)

    def sleep_then_wake(self, cycles: int) -> None:
        """The same two moves one after the other, without the host."""
        models = {}
        for name in self.names[:2]:
            with cumem.use_memory_pool(name):
                models[name] = self.build()
            models[name].load_state_dict(load_file(self.files[name]))
            cumem.sleep(tags=[name])
        cumem.wake_up([self.names[1]])
        for turn in range(2 * cycles):
            leaving, arriving = self.names[(turn + 1) % 2], self.names[turn % 2]
            started = time.perf_counter()
            cumem.sleep(tags=[leaving])
            cumem.wake_up([arriving])
            self.first_answer(arriving, models[arriving], started, "sleep, then wake")
        models.clear()
        cumem.wake_up()
        cumem.trim()
        cumem.release_host_memory()

    def reload(self, cycles: int) -> None:
        """The other's memory is there already: safetensors' load_file, and a copy into it."""
        model = self.build()
        for turn in range(cycles):
            name = self.names[turn % len(self.names)]
            started = time.perf_counter()
            model.load_state_dict(load_file(self.files[name]))
            self.first_answer(name, model, started, "reload from the file (in the page cache)")

    def restart(self, cycles: int) -> None:
        """A fresh process: imports, context, memory, load, answer."""
        for turn in range(cycles):
            name = self.names[turn % len(self.names)]
            command = [sys.executable, __file__, "--child", str(self.files[name]), str(self.width)]
            started = time.perf_counter()
            subprocess.run(command, check=True, timeout=120)
            self.rows.setdefault("restart of the process", []).append(time.perf_counter() - started)


def answer_once(file: str, width: int) -> None:
    """What the process of a restart does."""
    device = cumem.default_device()
    model = Model(width, device)
    model.load_state_dict(load_file(file))
    model(torch.ones(8, width, dtype=torch.bfloat16, device=device))
    synchronize(device)


def summary(rows: dict[str, list[float]]) -> str:
    """Median, least and most of each row, in seconds."""
    width = max(map(len, rows))
    lines = [f"{'until the first answer':{width}}  median     min     max   n"]
    for name, samples in rows.items():
        middle = statistics.median(samples)
        ends = f"{min(samples):7.3f} {max(samples):7.3f}"
        lines.append(f"{name:{width}} {middle:7.3f} {ends} {len(samples):3d}")
    return "\n".join(lines)


def measure(asked: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """All rows, in an order in which none has what it measures from another."""
    bench = Bench(asked, folder)
    steps: list[tuple[str, Callable[[], Any]]] = [
        ("checkpoints", bench.write),
        ("host", lambda: asyncio.run(bench.hosted(asked.cycles, asked.row_seconds))),
        ("sleep, then wake", lambda: bench.sleep_then_wake(asked.cycles)),
        ("reload", lambda: bench.reload(asked.cycles)),
    ]
    if asked.restart:
        steps.append(("restart", lambda: bench.restart(min(asked.cycles, 3))))
    host = {}
    for name, step in steps:
        say(f"{name}: {bench.model_bytes / GIB:.2f} GiB a model")
        done = step()
        host = done or host
    print(summary(bench.rows))
    if bench.device.type != "cuda":
        print(EMULATED)
    return {
        "model_bytes": bench.model_bytes,
        "models": len(bench.names),
        "budget_bytes": bench.budget,
        "host": host,
        "seconds": bench.rows,
        "machine": describe(bench.device),
    }


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the benchmark; returns the exit status."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    asked = _parser().parse_args(words)
    if asked.child:
        answer_once(asked.child[0], int(asked.child[1]))
        return 0
    with tempfile.TemporaryDirectory(dir=asked.folder) as folder:
        found = measure(asked, Path(folder))
    record = {"benchmark": "host", "command": command_of("bench_host.py", words), **found}
    write_json(asked.json, json.loads(json.dumps(record)))
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description="Time until a model that sleeps answers.")
    parser.add_argument("--gib", type=size, default=4.0, help="size of each model")
    parser.add_argument("--models", type=count, default=3)
    parser.add_argument("--fit", type=count, default=1, help="how many of them the budget holds")
    parser.add_argument("--cycles", type=count, default=4, help="samples of each model and row")
    parser.add_argument("--row-seconds", type=size, default=10.0, metavar="SECONDS")
    parser.add_argument("--restart", action="store_true", help="also start processes anew")
    parser.add_argument("--folder", type=Path, help="where checkpoints are written meanwhile")
    parser.add_argument("--child", nargs=2, help=argparse.SUPPRESS)
    add_json(parser)
    return parser


if __name__ == "__main__":
    sys.exit(main())
