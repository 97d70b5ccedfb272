"""Measures one library in one process; ``bench_sleep.py`` starts it.

Its arguments are the settings as JSON and the file for what it measured.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
import workload
from adapters import ADAPTERS, CACHE, WEIGHTS, Adapter, Moved
from machine import copy_ceiling, describe, pretouch, synchronize
from outside import Outside

GIB = 1 << 30


@dataclass(frozen=True)
class Settings:
    """What is to be measured; sizes in GiB."""

    adapter: str = "cumem"
    gib: float = 16.0
    kv_gib: float = 4.0
    kv_tensors: int = 64
    cycles: int = 5
    changed: tuple[int, ...] = (100, 1, 0)  # per cent of the weights' tensors
    fill: str = "random"
    pretouch: float = 0.0
    rest: float = 1.0  # seconds between a sleep and its wake


@dataclass
class Row:
    """One operation, measured several times. ``direction``: of its copies, if it makes any."""

    name: str
    what: str
    direction: str = ""
    samples: list[dict[str, Any]] = field(default_factory=list)


class Bench:
    """The tensors of one run, and the rows measured on them."""

    def __init__(self, adapter: Adapter, settings: Settings, outside: Outside) -> None:
        self._adapter = adapter
        self._settings = settings
        self._outside = outside
        self._device = adapter.device()
        self._turn = 0
        self.rows: dict[str, Row] = {}
        self.weights: list[torch.Tensor] = []
        self.cache: list[torch.Tensor] = []

    def build(self) -> None:
        """Makes weights and cache and fills both."""
        shapes = workload.llama_shapes(int(self._settings.gib * GIB))
        with self._adapter.scope(WEIGHTS):
            self.weights = [
                torch.empty(shape, dtype=torch.bfloat16, device=self._device) for shape in shapes
            ]
        workload.FILLS[self._settings.fill](self.weights)
        words = int(self._settings.kv_gib * GIB) // self._settings.kv_tensors // 8
        if words:
            with self._adapter.scope(CACHE):
                self.cache = [
                    torch.empty(words, dtype=torch.int64, device=self._device)
                    for _ in range(self._settings.kv_tensors)
                ]
            workload.fill_random(self.cache)
        workload.checksums(self.weights[:2])  # loads the kernels
        synchronize(self._device)

    def run(self) -> None:
        """All rows, in order."""
        self._weights_cycle("first", "the first of this process: host memory is new", 100)
        for percent in self._settings.changed:
            what = f"{percent} % of the tensors changed since the last wake"
            for _ in range(self._settings.cycles):
                self._weights_cycle(f"{percent} % changed", what, percent)
        what = "weights only, no tensor changed, with no rest between sleep and wake"
        for _ in range(self._settings.cycles):
            self._cycle("weights, at once", what, [WEIGHTS], 0, rest=0.0)
        if not self.cache:
            return
        self._cache_cycle("first", "the first of this process")
        for _ in range(self._settings.cycles):
            self._cache_cycle("later", "a later one")
        what = "KV only, contents discarded, with no rest between sleep and wake"
        for _ in range(self._settings.cycles):
            self._cycle("KV, at once", what, [CACHE], 0, rest=0.0)
        what = "weights, every byte changed, and KV in one call"
        for _ in range(self._settings.cycles):
            self._cycle("both", what, [WEIGHTS, CACHE], 100)

    def _weights_cycle(self, name: str, what: str, percent: int) -> None:
        self._cycle(f"weights, {name}", f"weights only, {what}", [WEIGHTS], percent)

    def _cache_cycle(self, name: str, what: str) -> None:
        self._cycle(f"KV, {name}", f"KV only, contents discarded, {what}", [CACHE], 0)

    def _cycle(
        self,
        name: str,
        what: str,
        tags: Sequence[str],
        percent: int,
        *,
        rest: float | None = None,
    ) -> None:
        """One sleep and one wake; all checks are outside of the timers."""
        self._turn += 1
        changed = workload.change(self.weights, percent, self._turn)
        before = workload.checksums(self.weights)
        where = [tensor.data_ptr() for tensor in (*self.weights, *self.cache)]
        slept = self._row(f"sleep: {name}", f"sleep of {what}", "d2h" if WEIGHTS in tags else "")
        slept.samples.append(
            {"changed_bytes": changed, **self._timed(lambda: self._adapter.sleep(tags))}
        )
        time.sleep(self._settings.rest if rest is None else rest)
        woken = self._row(f"wake:  {name}", f"wake of {what}", "h2d" if WEIGHTS in tags else "")
        woken.samples.append(self._timed(lambda: self._adapter.wake(tags)))
        if CACHE in tags:
            workload.fill_random(self.cache, self._turn)  # it must be there
        if where != [tensor.data_ptr() for tensor in (*self.weights, *self.cache)]:
            raise SystemExit(f"{self._adapter.name}: an address changed in {name!r}")
        if workload.checksums(self.weights) != before:
            raise SystemExit(f"{self._adapter.name}: contents changed in {name!r}")
        print(
            f"  {name}: {slept.samples[-1]['seconds']:.4f} s asleep, "
            f"{woken.samples[-1]['seconds']:.4f} s awake",
            file=sys.stderr,
            flush=True,
        )

    def _row(self, name: str, what: str, direction: str) -> Row:
        return self.rows.setdefault(name, Row(name, what, direction))

    def _timed(self, call: Callable[[], Moved]) -> dict[str, Any]:
        free = self._outside.free_bytes()
        synchronize(self._device)
        started, processor = time.perf_counter(), time.process_time()
        moved = call()
        synchronize(self._device)
        seconds = time.perf_counter() - started
        spent = time.process_time() - processor
        now = self._outside.free_bytes()
        return {
            "seconds": seconds,
            "cpu_seconds": spent,
            "copied_bytes": moved.copied_bytes,
            "host_bytes": self._adapter.host_bytes(),
            "freed_bytes_seen_outside": None if free is None or now is None else now - free,
            "phases": dict(moved.phases),
        }


def measure(settings: Settings) -> dict[str, Any]:
    """Everything that one process measures."""
    adapter = ADAPTERS[settings.adapter]()
    device = adapter.device()
    touched = pretouch(int(settings.pretouch * GIB)) if settings.pretouch else None
    with Outside(emulated=device.type != "cuda") as outside:
        ceilings = [copy_ceiling(device)]
        bench = Bench(adapter, settings, outside)
        bench.build()
        bench.run()
        ceilings.append(copy_ceiling(device))
        return {
            "adapter": {"name": adapter.name, "version": adapter.version},
            "settings": asdict(settings),
            "environment": describe(device),
            "pretouch_seconds": touched,
            "outside_is_blind": outside.blind,
            "weights_bytes": workload.bytes_of(bench.weights),
            "weights_tensors": len(bench.weights),
            "kv_bytes": workload.bytes_of(bench.cache),
            "kv_tensors": len(bench.cache),
            "ceiling_first": ceilings[0],
            "ceiling_last": ceilings[1],
            "rows": [asdict(row) for row in bench.rows.values()],
        }


def main() -> None:
    chosen = json.loads(sys.argv[1])
    settings = Settings(**{**chosen, "changed": tuple(chosen["changed"])})
    Path(sys.argv[2]).write_text(json.dumps(measure(settings)), encoding="utf-8")


if __name__ == "__main__":
    main()
