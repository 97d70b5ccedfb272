"""Which rows does one process measure?

A process has only the tensors that its rows need, so that libraries whose sleep
concerns everything can be measured like the others.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import workload
from adapters import CACHE, WEIGHTS
from cycles import Bench
from settings import GIB

_NEW = "the first of this process: host memory is new"


@dataclass(frozen=True)
class Scenario:
    """What a process measures, and how."""

    what: str
    run: Callable[[Bench], None]


def _first(bench: Bench) -> None:
    bench.build_weights(workload.llama_shapes(int(bench.settings.gib * GIB)))
    bench.cycle("weights, first", f"weights, {_NEW}", [WEIGHTS], 100)


def _prepared(bench: Bench) -> None:
    bench.build_weights(workload.llama_shapes(int(bench.settings.gib * GIB)))
    bench.prepare("host memory for the weights is made and waited for, before the first sleep")
    what = "weights, the first of this process, after host memory was made for it"
    bench.cycle("weights, first after prepare", what, [WEIGHTS], 100)


def _later(bench: Bench) -> None:
    _first(bench)
    changed = bench.settings.changed
    for percent in changed[:1] if bench.adapter.copies_everything else changed:
        bench.repeat(partial(_changed, bench, percent))
    what = "weights, no tensor changed, with no rest between sleep and wake"
    bench.repeat(lambda: bench.cycle("weights, at once", what, [WEIGHTS], 0, rest=0.0))


def _changed(bench: Bench, percent: int) -> None:
    what = f"weights, {percent} % of the tensors changed since the last wake"
    bench.cycle(f"weights, {percent} % changed", what, [WEIGHTS], percent)


def _many(bench: Bench) -> None:
    bench.build_weights(workload.small_shapes(bench.settings.many))
    what = "tensors of 1 KiB to 2 MiB"
    bench.cycle("small tensors, first", f"{what}, {_NEW}", [WEIGHTS], 100)
    bench.repeat(
        lambda: bench.cycle("small tensors", f"{what}, every byte changed", [WEIGHTS], 100)
    )


def _kv(bench: Bench) -> None:
    bench.build_cache()
    what = "KV, contents discarded"
    bench.cycle("KV, first", f"{what}, the first of this process", [CACHE], 0)
    bench.repeat(lambda: bench.cycle("KV, later", f"{what}, a later one", [CACHE], 0))
    at_once = f"{what}, with no rest between sleep and wake"
    bench.repeat(lambda: bench.cycle("KV, at once", at_once, [CACHE], 0, rest=0.0))


def _both(bench: Bench) -> None:
    bench.build_weights(workload.llama_shapes(int(bench.settings.gib * GIB)))
    bench.build_cache()
    tags = [WEIGHTS, CACHE]
    bench.cycle("both, first", f"weights and KV in one call, {_NEW}", tags, 100)
    what = "weights, every byte changed, and KV in one call"
    bench.repeat(lambda: bench.cycle("both", what, tags, 100))


SCENARIOS = {
    "later": Scenario("the first sleep of the weights, and later ones", _later),
    "first": Scenario("the first sleep of the weights", _first),
    "prepared": Scenario("the first sleep, after host memory was made for it", _prepared),
    "many": Scenario("many small tensors", _many),
    "kv": Scenario("KV cache", _kv),
    "both": Scenario("weights and KV cache in one call", _both),
}
