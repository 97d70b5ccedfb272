"""Measures one library in one process; ``bench_sleep.py`` starts it.

Its arguments are the settings as JSON and the file for what it measured.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import workload
from adapters import Adapter, UnavailableError
from cycles import Bench
from libraries import ADAPTERS
from machine import copy_ceiling, describe
from measuring import Meter
from outside import Outside
from scenarios import SCENARIOS
from settings import SleepSettings, from_json


def measure(adapter: Adapter, settings: SleepSettings) -> dict[str, Any]:
    """Everything that one process measures."""
    device = adapter.device()
    with Outside(emulated=device.type != "cuda") as outside:
        ceilings = [copy_ceiling(device)]
        bench = Bench(adapter, settings, Meter(adapter, outside))
        SCENARIOS[settings.scenario].run(bench)
        ceilings.append(copy_ceiling(device))
        return {
            "adapter": {"name": adapter.name, "version": adapter.version},
            "settings": asdict(settings),
            "environment": describe(device),
            "outside_is_blind": outside.blind,
            "weights_bytes": workload.bytes_of(bench.weights),
            "weights_tensors": len(bench.weights),
            "kv_bytes": workload.bytes_of(bench.cache),
            "kv_tensors": len(bench.cache),
            "ceilings": ceilings,
            "rows": [asdict(row) for row in bench.rows.values()],
        }


def answer(measured: Callable[[], dict[str, Any]], file: str) -> None:
    """Writes what was measured, or why it cannot be."""
    try:
        found = measured()
    except UnavailableError as error:
        found = {"unavailable": str(error)}
    Path(file).write_text(json.dumps(found), encoding="utf-8")


def main() -> None:
    settings = from_json(SleepSettings, json.loads(sys.argv[1]))
    answer(lambda: measure(ADAPTERS[settings.adapter](), settings), sys.argv[2])


if __name__ == "__main__":
    main()
