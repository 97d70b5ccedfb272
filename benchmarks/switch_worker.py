"""Measures switches of one library in one process; ``bench_switch.py`` starts it.

Its arguments are the settings as JSON and the file for what it measured.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import asdict
from functools import partial
from typing import Any

import torch
import workload
from adapters import Adapter
from libraries import ADAPTERS
from machine import copy_ceiling, describe, synchronize
from measuring import Done, Meter, Row, added, repeat
from outside import Outside
from processes import say
from settings import GIB, SwitchSettings, from_json
from worker import answer

Tensors = list[torch.Tensor]
Call = Callable[[str, str], Done]

_MODELS = ("model_a", "model_b")
_HOG = "hog"


class SwitchBench:
    """Two models with room for little more than one, and the rows measured on them."""

    def __init__(self, adapter: Adapter, settings: SwitchSettings, meter: Meter) -> None:
        self._adapter = adapter
        self._settings = settings
        self._meter = meter
        self._device = adapter.device()
        self._turn = 0
        self._sums: dict[str, list[int]] = {}
        self._hog: torch.Tensor | None = None
        self._models: dict[str, Tensors] = {}
        self._awake, self._asleep = _MODELS[1], _MODELS[0]
        self.free_bytes = 0  # on the device, beside the model that is awake
        self.rows: dict[str, Row] = {}

    @property
    def model(self) -> Tensors:
        return self._models[_MODELS[0]]

    def build(self) -> None:
        """Makes the first model, puts it to sleep, makes the second; then fills the device."""
        self._build(_MODELS[0], seed=1)
        self._sums[_MODELS[0]] = workload.checksums(self._models[_MODELS[0]])
        self._adapter.sleep([_MODELS[0]])
        self._build(_MODELS[1], seed=2)
        workload.checksums(self._models[_MODELS[1]])  # takes the memory that checks need
        self._fill_device()

    def release_device(self) -> None:
        """Gives back what :meth:`build` took so that the device was full."""
        self._hog = None
        if self._device.type == "cuda":
            torch.cuda.empty_cache()

    def run(self) -> None:
        """All rows, in order."""
        if self._adapter.switches:
            self._rows_of("switch", self._switch)
        self._rows_of("sleep, then wake", self._in_turn)

    def _rows_of(self, how: str, call: Call) -> None:
        if not self.rows:
            what = "the model that goes never slept: its host memory is new"
            self._cycle(f"{how}: first", f"{how}, {what}", 100, call)
        for name, percent in (("both dirty", 100), ("leaving clean", 0)):
            if percent == 0 and self._adapter.copies_everything:
                continue
            what = f"{how}; {percent} % of the leaving model's tensors changed since its wake"
            cycle = partial(self._cycle, f"{how}: {name}", what, percent, call)
            repeat(self._settings.cycles, self._settings.row_seconds, cycle)

    def _switch(self, leaving: str, arriving: str) -> Done:
        out, back = self._adapter.switch(leaving, arriving)
        return added(out, back, self._bytes(leaving))

    def _in_turn(self, leaving: str, arriving: str) -> Done:
        out = self._adapter.sleep([leaving])
        return added(out, self._adapter.wake([arriving]), self._bytes(leaving))

    def _cycle(self, name: str, what: str, percent: int, call: Call) -> None:
        """One switch; the arriving model is checked outside of the timer."""
        self._turn += 1
        leaving, arriving = self._awake, self._asleep
        workload.change(self._models[leaving], percent, self._turn)
        self._sums[leaving] = workload.checksums(self._models[leaving])
        where = self._addresses()
        time.sleep(self._settings.rest)
        row = self._row(name, what, leaving, arriving, copied_out=percent > 0)
        row.samples.append(self._meter.sample(lambda: call(leaving, arriving)))
        self._awake, self._asleep = arriving, leaving
        if where != self._addresses():
            raise SystemExit(f"{self._adapter.name}: an address changed in {name!r}")
        if workload.checksums(self._models[arriving]) != self._sums[arriving]:
            raise SystemExit(f"{self._adapter.name}: contents changed in {name!r}")
        say(f"  {name}: {row.samples[-1]['seconds']:.4f} s")

    def _row(self, name: str, what: str, leaving: str, arriving: str, *, copied_out: bool) -> Row:
        both = self._bytes(leaving) + self._bytes(arriving)
        link = both if copied_out else self._bytes(arriving)
        row = Row(name, what, "both" if copied_out else "h2d", both, both, link_bytes=link)
        return self.rows.setdefault(name, row)

    def _build(self, tag: str, *, seed: int) -> None:
        shapes = workload.llama_shapes(int(self._settings.gib * GIB))
        with self._adapter.scope(tag):
            self._models[tag] = [
                torch.empty(shape, dtype=torch.bfloat16, device=self._device) for shape in shapes
            ]
        workload.FILLS[self._settings.fill](self._models[tag], seed)
        synchronize(self._device)

    def _fill_device(self) -> None:
        """Takes all device memory but the slack: a plain tensor, or a resident pool's there."""
        wanted = self._free() - int(self._settings.slack_gib * GIB)
        if wanted > 0:
            scope: Any = nullcontext() if self._device.type == "cuda" else _resident_pool()
            with scope:
                self._hog = torch.empty(wanted, dtype=torch.uint8, device=self._device)
        self.free_bytes = self._free()

    def _free(self) -> int:
        if self._device.type == "cuda":
            return torch.cuda.mem_get_info(self._device)[0]
        import cumem

        device = cumem.stats().devices[0]
        return device.total_bytes - device.used_bytes

    def _bytes(self, tag: str) -> int:
        return workload.bytes_of(self._models[tag])

    def _addresses(self) -> list[int]:
        return [tensor.data_ptr() for model in self._models.values() for tensor in model]


def _resident_pool() -> Any:
    """On the emulator only memory of a pool is on the device."""
    import cumem

    return cumem.use_memory_pool(_HOG, on_sleep="keep")


def measure(adapter: Adapter, settings: SwitchSettings) -> dict[str, Any]:
    """Everything that one process measures."""
    device = adapter.device()
    with Outside(emulated=device.type != "cuda") as outside:
        ceilings = [copy_ceiling(device, both=True)]
        bench = SwitchBench(adapter, settings, Meter(adapter, outside))
        bench.build()
        bench.run()
        bench.release_device()
        ceilings.append(copy_ceiling(device, both=True))
        return {
            "adapter": {"name": adapter.name, "version": adapter.version},
            "settings": asdict(settings),
            "environment": describe(device),
            "weights_bytes": workload.bytes_of(bench.model),
            "weights_tensors": len(bench.model),
            "free_bytes_beside_one": bench.free_bytes,
            "ceilings": ceilings,
            "rows": [asdict(row) for row in bench.rows.values()],
        }


def main() -> None:
    settings = from_json(SwitchSettings, json.loads(sys.argv[1]))
    answer(lambda: measure(ADAPTERS[settings.adapter](), settings), sys.argv[2])


if __name__ == "__main__":
    main()
