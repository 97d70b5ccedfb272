"""Is nobody lost when an engine sleeps and wakes under load? A short run of the benchmark."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

import pytest
from support import MIB, make

import cumem

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))  # scripts import by name

from controller_load import Load, LoadSettings, Outcome, Served


def run(settings: LoadSettings) -> Outcome:
    with cumem.use_memory_pool("weights"):
        weights = [make(MIB // 4, seed) for seed in range(4)]
    return asyncio.run(asyncio.wait_for(Load(weights, settings).run(), 240))


def test_no_request_is_lost_and_none_runs_on_sleeping_memory() -> None:
    outcome = run(LoadSettings(requests=200, clients=16, cycles=12))
    assert outcome.faults == []
    assert sorted(item.number for item in outcome.served) == list(range(200))
    assert len(outcome.sleeps) >= 12
    assert any(item.waited for item in outcome.served)


def test_a_request_that_ran_while_memory_slept_would_be_seen() -> None:
    settings = LoadSettings(requests=2, clients=1, cycles=1)
    with cumem.use_memory_pool("weights"):
        load = Load([make(MIB // 4)], settings)
    outcome = asyncio.run(load.run())
    assert outcome.faults == []
    left, back = load._away[0]
    outcome.served[0] = Served(0, left, left, back, waited=True, right=False)

    class Controller:
        history = ()

    load._judge(Controller())  # type: ignore[arg-type]
    assert "request 0 read wrong bytes" in outcome.faults
    assert "request 0 ran while memory slept" in outcome.faults


@pytest.mark.parametrize("cycles", [1, 3])
def test_the_last_cycle_ends_awake_also_when_nobody_is_left_to_wake(cycles: int) -> None:
    outcome = run(LoadSettings(requests=cycles, clients=1, cycles=cycles))
    assert outcome.faults == []
    assert not cumem.is_sleeping()
