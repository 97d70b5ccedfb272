"""How soon does a model that sleeps answer: after its wake, or during it?

    python benchmarks/bench_stream_wake.py --gib 4 --json stream.json

README.md beside this file says what each number means.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

import stack
import torch
from adapters import CumemAdapter
from libraries import OURS
from machine import copy_ceiling, describe, synchronize
from plot import need_matplotlib, save_plot
from processes import command_of, say, write_json
from settings import GIB, add_outputs, count, size
from summary import best_ceiling, summary
from tables import heading, milliseconds, text_table

import cumem

_TAG = "stack"
_FIRST, _WHOLE, _RETURN = "first layer", "whole forward", "all awake"


class Clock:
    """Moments on the device's own time line, or the host's where there is no device."""

    def __init__(self, device: torch.device) -> None:
        self._on_device = device.type == "cuda"
        self._moments: dict[str, Any] = {}

    def mark(self, name: str) -> None:
        """When what is enqueued so far is done."""
        if self._on_device:
            event = torch.cuda.Event(enable_timing=True)
            event.record()
            self._moments[name] = event
        else:
            self._moments[name] = time.perf_counter()

    def seconds(self, begin: str, end: str) -> float:
        """pre: the device was waited for."""
        first, last = self._moments[begin], self._moments[end]
        if self._on_device:
            return float(first.elapsed_time(last)) / 1e3
        return float(last - first)


class StreamBench:
    """A stack that sleeps and answers, again and again."""

    def __init__(self, target_bytes: int, tokens: int) -> None:
        self.device = cumem.default_device()
        with cumem.use_memory_pool(_TAG):
            self.model = stack.build(target_bytes, self.device)
        stack.fill(self.model)
        self._input = stack.example(self.model, tokens)
        self._clock = Clock(self.device)
        self.model.layers[0].register_forward_hook(lambda *_: self._clock.mark(_FIRST))
        self._forward()  # loads kernels
        self.reference = self._forward().clone()
        self.live_bytes = sum(p.numel() * p.element_size() for p in self.model.parameters())
        self.rows: dict[str, dict[str, Any]] = {}

    def run(self, cycles: int) -> None:
        """All rows; the ways take turns, so that none always follows the same other."""
        self._cycle("warm-up", self._wake_then_run)
        self.rows.clear()
        for _ in range(cycles):
            self._forward_alone()
            self._cycle("wake, then run", self._wake_then_run)
            self._cycle("stream_wake", self._stream_wake)

    def _cycle(self, name: str, way: Callable[[], torch.Tensor]) -> None:
        cumem.sleep(tags=[_TAG])
        synchronize(self.device)
        processor = time.process_time()
        self._clock.mark("call")
        output = way()
        synchronize(self.device)
        spent = time.process_time() - processor
        for what in (_FIRST, _WHOLE, _RETURN):
            self._add(f"{name}: {what}", self._clock.seconds("call", what), spent, self.live_bytes)
        if not torch.equal(output.view(torch.int16), self.reference.view(torch.int16)):
            raise SystemExit(f"{name}: the output is not bit for bit what it was")
        say(f"  {name}: {self._clock.seconds('call', _WHOLE):.4f} s to the whole output")

    def _wake_then_run(self) -> torch.Tensor:
        cumem.wake_up([_TAG])
        self._clock.mark(_RETURN)
        output = self._forward()
        self._clock.mark(_WHOLE)
        return output

    def _stream_wake(self) -> torch.Tensor:
        handle = cumem.stream_wake(self.model, [_TAG])
        output = self._forward()
        self._clock.mark(_WHOLE)
        handle.wait()
        self._clock.mark(_RETURN)
        return output

    def _forward_alone(self) -> None:
        synchronize(self.device)
        processor = time.process_time()
        self._clock.mark("call")
        self._forward()
        self._clock.mark(_WHOLE)
        synchronize(self.device)
        spent = time.process_time() - processor
        for what in (_FIRST, _WHOLE):
            self._add(f"forward, awake: {what}", self._clock.seconds("call", what), spent, 0)

    @torch.inference_mode()
    def _forward(self) -> torch.Tensor:
        output: torch.Tensor = self.model(self._input)
        return output

    def _add(self, name: str, seconds: float, processor: float, link_bytes: int) -> None:
        row = self.rows.setdefault(name, _row(name, self.live_bytes, link_bytes))
        row["samples"].append({"seconds": seconds, "cpu_seconds": processor, "phases": {}})


def _row(name: str, live_bytes: int, link_bytes: int) -> dict[str, Any]:
    return {
        "name": name,
        "what": f"from the call to: {name}",
        "direction": "h2d" if link_bytes else "",
        "live_bytes": live_bytes,
        "offloaded_bytes": live_bytes,
        "link_bytes": link_bytes,
        "samples": [],
    }


def measure(target_bytes: int, tokens: int, cycles: int) -> dict[str, Any]:
    """The result of this library, as the other benchmarks write theirs."""
    device = cumem.default_device()
    ceilings = [copy_ceiling(device)]
    bench = StreamBench(target_bytes, tokens)
    bench.run(cycles)
    ceilings.append(copy_ceiling(device))
    process: dict[str, Any] = {
        "adapter": {"name": OURS, "version": CumemAdapter().version},
        "environment": describe(device),
        "weights_bytes": bench.live_bytes,
        "weights_tensors": len(list(bench.model.parameters())),
        "layers": len(bench.model.layers),
        "width": bench.model.width,
        "tokens": tokens,
        "ceilings": ceilings,
        "rows": list(bench.rows.values()),
    }
    ceiling = best_ceiling([process])
    real = not process["environment"]["emulated"]
    rows = [summary(row, ceiling, real=real) for row in process["rows"]]
    return {"ceiling_gb_per_s": ceiling, "rows": rows, "processes": [process]}


def shown(result: dict[str, Any]) -> str:
    """The result for people to read."""
    process = result["processes"][0]
    lines = [
        (
            row["name"],
            str(row["count"]),
            *(milliseconds(row[f"{which}_seconds"]) for which in ("median", "min", "max")),
            milliseconds(row.get("link_seconds")),
        )
        for row in result["rows"]
    ]
    shape = f"{process['layers']} layers of width {process['width']}, {process['tokens']} tokens"
    header = ("from the call to", "n", "median ms", "min", "max", "plain copy")
    return "\n".join([heading(result), f"  {shape}", "", text_table(header, lines)])


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the benchmark; returns the exit status."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    parser = argparse.ArgumentParser(
        description="Time to the first layer's output and to the whole, after and during a wake."
    )
    parser.add_argument("--gib", type=size, default=4.0, help="size of the weights")
    parser.add_argument("--tokens", type=count, default=512, help="length of the input")
    parser.add_argument("--cycles", type=count, default=9, help="samples of each row")
    add_outputs(parser)
    asked = parser.parse_args(words)
    if asked.plot is not None:
        need_matplotlib()
    result = measure(int(asked.gib * GIB), asked.tokens, asked.cycles)
    print(shown(result))
    record = {
        "benchmark": "stream_wake",
        "command": command_of("bench_stream_wake.py", words),
        "results": {OURS: result},
        "missing": {},
        "targets": [],
    }
    write_json(asked.json, record)
    if asked.plot is not None:
        save_plot([record], asked.plot)
    return 0


if __name__ == "__main__":
    sys.exit(main())
