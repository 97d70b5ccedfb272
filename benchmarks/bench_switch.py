"""How long do two models take to change places on a device that has room for one?

    python benchmarks/bench_switch.py --json switch.json

README.md beside this file says what each number means.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from typing import Any

from comparison import Comparison, add_libraries
from processes import Runner, rotated
from settings import GIB, SwitchSettings, add_common, chosen, size
from targets import SWITCH_TARGETS


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the benchmark; returns the exit status."""
    comparison = Comparison("switch", SWITCH_TARGETS, _room)
    return comparison.run(_parser(), _measure, arguments)


def _room(result: dict[str, Any]) -> str:
    slack = result["processes"][0]["free_bytes_beside_one"] / GIB
    return f"two such models; {slack:.2f} GiB of the device free beside one"


def _measure(asked: argparse.Namespace) -> Runner:
    turns = range(asked.processes)
    plan = [name for turn in turns for name in rotated(asked.adapters, turn)]
    runner = Runner("switch_worker.py", len(plan))
    for adapter in plan:
        runner.run(chosen(SwitchSettings, asked, adapter=adapter), "switch")
    return runner


def _parser() -> argparse.ArgumentParser:
    default = SwitchSettings()
    parser = argparse.ArgumentParser(
        description="Time in which two Llama-like models change places on one device."
    )
    add_common(parser, default)
    parser.add_argument(
        "--slack",
        dest="slack_gib",
        type=size,
        default=default.slack_gib,
        metavar="GIB",
        help="device memory left free beside one model",
    )
    add_libraries(parser, processes=1)
    return parser


if __name__ == "__main__":
    sys.exit(main())
