"""How is a benchmark of several libraries asked for, run and told?"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from libraries import ADAPTERS, OURS, originals
from plot import need_matplotlib, save_plot
from processes import Runner, command_of, write_json
from settings import count
from summary import summarise
from tables import beside_table, rows_table
from targets import Target, as_records, judged, targets_table


def add_libraries(parser: argparse.ArgumentParser, processes: int) -> None:
    """Who is measured, and in how many processes."""
    parser.add_argument(
        "--processes",
        type=count,
        default=processes,
        help="fresh processes: samples of the first rows",
    )
    parser.add_argument("--adapters", nargs="+", choices=sorted(ADAPTERS), default=[OURS])


def _nothing(result: dict[str, Any]) -> str:
    return ""


@dataclass(frozen=True)
class Comparison:
    """The benchmark of ``bench_<name>.py``."""

    name: str
    targets: Sequence[Target]  # of this library's rows
    remark: Callable[[dict[str, Any]], str] = _nothing  # a line below the rows of a library

    def run(
        self,
        parser: argparse.ArgumentParser,
        measure: Callable[[argparse.Namespace], Runner],
        arguments: Sequence[str] | None,
    ) -> int:
        """Measures what the command line asks for; returns the exit status."""
        words = list(sys.argv[1:] if arguments is None else arguments)
        asked = parser.parse_args(words)
        if asked.plot is not None:
            need_matplotlib()
        runner = measure(asked)
        record = self._told(runner, words)
        write_json(asked.json, record)
        if asked.plot is not None and record["results"]:
            save_plot([record], asked.plot)
        return runner.status

    def _told(self, runner: Runner, words: list[str]) -> dict[str, Any]:
        """Prints the tables; returns all of it for the file."""
        results = {name: summarise(found) for name, found in runner.measured.items()}
        for result in results.values():
            print(rows_table(result))
            if remark := self.remark(result):
                print(remark)
            print()
        for original, drop_in in originals(results):
            print(beside_table(results[original], results[drop_in]), end="\n\n")
        for name, why in runner.missing.items():
            print(f"{name}: {why}", end="\n\n")
        verdicts = judged(self.targets, results[OURS]) if OURS in results else []
        if verdicts:
            print(targets_table(verdicts))
        return {
            "benchmark": self.name,
            "command": command_of(f"bench_{self.name}.py", words),
            "results": results,
            "missing": runner.missing,
            "targets": as_records(verdicts),
        }
