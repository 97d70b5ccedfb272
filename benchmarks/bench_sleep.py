"""How long do sleep and wake of a model's weights and KV cache take?

    python benchmarks/bench_sleep.py --json out.json

README.md beside this file says what each number means.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from comparison import Comparison, add_libraries
from processes import Runner, pretouch, schedule
from settings import (
    PEER_SCENARIOS,
    SleepSettings,
    add_common,
    add_pretouch,
    chosen,
    count,
    percents,
    size,
)
from targets import SLEEP_TARGETS

_SCENARIOS = ("later", "first", "prepared", "many", "kv", "both")
_DEFAULT = ("later", "first", "prepared", "many", "kv")


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the benchmark; returns the exit status."""
    return Comparison("sleep", SLEEP_TARGETS).run(_parser(), _measure, arguments)


def _measure(asked: argparse.Namespace) -> Runner:
    """Every library in every scenario, in fresh processes one after the other."""
    pretouch(asked.pretouch)
    plan = list(schedule(asked.adapters, _processes(asked), asked.peer_scenarios))
    runner = Runner("worker.py", len(plan))
    for scenario, adapter in plan:
        settings = chosen(SleepSettings, asked, adapter=adapter, scenario=scenario)
        runner.run(settings, scenario)
    return runner


def _processes(asked: argparse.Namespace) -> dict[str, int]:
    """How many processes each scenario is given.

    A first sleep has one sample for each process; ``later`` begins with one, too.
    """
    times = {"prepared": asked.processes}
    times["first"] = max(0, asked.processes - ("later" in asked.scenarios))
    return {name: times.get(name, 1) for name in _SCENARIOS if name in asked.scenarios}


def _parser() -> argparse.ArgumentParser:
    default = SleepSettings()
    parser = argparse.ArgumentParser(
        description="Time of sleep and wake of Llama-like bf16 weights and of a KV cache."
    )
    add_common(parser, default)
    parser.add_argument("--kv-gib", type=size, default=default.kv_gib, help="size of the KV cache")
    parser.add_argument("--kv-tensors", type=count, default=default.kv_tensors)
    parser.add_argument(
        "--many", type=count, default=default.many, metavar="N", help="how many small tensors"
    )
    parser.add_argument(
        "--changed",
        type=percents,
        default=default.changed,
        metavar="P,P,...",
        help="per cent of the weights' tensors that change between cycles (default: 100,1,0)",
    )
    add_pretouch(parser)
    add_libraries(parser, processes=3)
    parser.add_argument("--scenarios", nargs="+", choices=_SCENARIOS, default=list(_DEFAULT))
    parser.add_argument(
        "--peer-scenarios",
        nargs="*",
        choices=_SCENARIOS,
        default=list(PEER_SCENARIOS),
        help="of these, the ones that other libraries are measured in (default: later kv)",
    )
    return parser


if __name__ == "__main__":
    sys.exit(main())
