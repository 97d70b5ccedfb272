"""How long do two models take to change places on a device that has room for one?

    python benchmarks/bench_switch.py --json switch.json

README.md beside this file says what each number means.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from libraries import ADAPTERS, OURS
from plot import need_matplotlib, save_plot
from processes import Runner, command_of, rotated, write_json
from settings import GIB, SwitchSettings, add_common, chosen, count, size
from summary import summarise
from tables import rows_table
from targets import SWITCH_TARGETS, as_records, judged, targets_table


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the benchmark; returns the exit status."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    asked = _parser().parse_args(words)
    if asked.plot is not None:
        need_matplotlib()
    runner = _measure(asked)
    results = {name: summarise(found) for name, found in runner.measured.items()}
    for result in results.values():
        print(rows_table(result))
        slack = result["processes"][0]["free_bytes_beside_one"] / GIB
        print(f"two such models; {slack:.2f} GiB of the device free beside one", end="\n\n")
    for name, why in runner.missing.items():
        print(f"{name}: {why}", end="\n\n")
    verdicts = judged(SWITCH_TARGETS, results[OURS]) if OURS in results else []
    if verdicts:
        print(targets_table(verdicts))
    record = {
        "benchmark": "switch",
        "command": command_of("bench_switch.py", words),
        "results": results,
        "missing": runner.missing,
        "targets": as_records(verdicts),
    }
    write_json(asked.json, record)
    if asked.plot is not None and results:
        save_plot([record], asked.plot)
    return runner.status


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
    parser.add_argument(
        "--processes", type=count, default=1, help="fresh processes: samples of the first rows"
    )
    parser.add_argument("--adapters", nargs="+", choices=sorted(ADAPTERS), default=[OURS])
    return parser


if __name__ == "__main__":
    sys.exit(main())
