"""One sleep and one wake: timed, and proved to have lost nothing."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import torch
import workload
from adapters import CACHE, WEIGHTS, Adapter
from machine import synchronize
from measuring import Done, Meter, Row, comes_back, repeat, resolved
from processes import say
from settings import GIB, SleepSettings
from workload import Shape


class Bench:
    """The tensors of one process, and the rows measured on them."""

    def __init__(self, adapter: Adapter, settings: SleepSettings, meter: Meter) -> None:
        self.adapter = adapter
        self.settings = settings
        self._meter = meter
        self._device = adapter.device()
        self._turn = 0
        self.rows: dict[str, Row] = {}
        self.weights: list[torch.Tensor] = []
        self.cache: list[torch.Tensor] = []

    def build_weights(self, shapes: Sequence[Shape]) -> None:
        """Makes the weights and fills them."""
        with self.adapter.scope(WEIGHTS):
            self.weights = [
                torch.empty(shape, dtype=torch.bfloat16, device=self._device) for shape in shapes
            ]
        workload.FILLS[self.settings.fill](self.weights)
        workload.checksums(self.weights[:2])  # loads the kernels
        synchronize(self._device)

    def build_cache(self) -> None:
        """Makes the KV cache and fills it."""
        words = max(1, int(self.settings.kv_gib * GIB) // self.settings.kv_tensors // 8)
        with self.adapter.scope(CACHE):
            self.cache = [
                torch.empty(words, dtype=torch.int64, device=self._device)
                for _ in range(self.settings.kv_tensors)
            ]
        workload.fill_random(self.cache)
        synchronize(self._device)

    def repeat(self, cycle: Callable[[], object]) -> None:
        """As many cycles as were asked for, or as there is time for."""
        repeat(self.settings.cycles, self.settings.row_seconds, cycle)

    def prepare(self, what: str) -> None:
        """Host memory is made before the first sleep; its time is a row."""
        row = self._row("prepare: weights", what, [WEIGHTS], "")

        def call() -> Done:
            self.adapter.prepare([WEIGHTS])
            return Done(None, {})

        row.samples.append(self._meter.sample(call))
        say(f"  prepare: {row.samples[-1]['seconds']:.4f} s for {row.live_bytes / GIB:.2f} GiB")

    def cycle(
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
        where = self._addresses()
        slept = self._row(f"sleep: {name}", f"sleep of {what}", tags, "d2h")
        back = slept.offloaded_bytes
        taken = self._meter.sample(lambda: resolved(self.adapter.sleep(tags), back))
        slept.samples.append({"changed_bytes": changed, **taken})
        time.sleep(self.settings.rest if rest is None else rest)
        woken = self._row(f"wake:  {name}", f"wake of {what}", tags, "h2d")
        woken.samples.append(self._meter.sample(lambda: resolved(self.adapter.wake(tags), back)))
        if CACHE in tags:
            workload.fill_random(self.cache, self._turn)  # it must be there
        if where != self._addresses():
            raise SystemExit(f"{self.adapter.name}: an address changed in {name!r}")
        if workload.checksums(self.weights) != before:
            raise SystemExit(f"{self.adapter.name}: contents changed in {name!r}")
        times = slept.samples[-1]["seconds"], woken.samples[-1]["seconds"]
        say(f"  {name}: {times[0]:.4f} s to sleep, {times[1]:.4f} s to wake")

    def _addresses(self) -> list[int]:
        return [tensor.data_ptr() for tensor in (*self.weights, *self.cache)]

    def _row(self, name: str, what: str, tags: Sequence[str], direction: str) -> Row:
        live = {WEIGHTS: workload.bytes_of(self.weights), CACHE: workload.bytes_of(self.cache)}
        back = comes_back(tags, live)
        total = sum(live[tag] for tag in tags)
        row = Row(name, what, direction if back else "", total, back, link_bytes=back)
        return self.rows.setdefault(name, row)
