"""How is each measurement given a process of its own, and who comes when?"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from libraries import ADAPTERS, OURS

_FOLDER = Path(__file__).parent
_LONGEST = 420.0  # seconds; a process that takes longer hangs


def rotated(names: Sequence[str], turn: int) -> list[str]:
    """The names, beginning with another one at each turn."""
    start = turn % len(names) if names else 0
    return [*names[start:], *names[:start]]


def schedule(
    adapters: Sequence[str], scenarios: Mapping[str, int], peer_scenarios: Sequence[str]
) -> Iterator[tuple[str, str]]:
    """(scenario, adapter) of each process, in order.

    ``scenarios`` says how many processes each is given. Libraries take turns at coming
    first, so that none is always measured on a machine that another has just used.
    """
    rounds = [scenario for scenario, times in scenarios.items() for _ in range(times)]
    for turn, scenario in enumerate(rounds):
        for name in rotated(adapters, turn):
            asked = name == OURS or scenario in peer_scenarios
            if asked and (scenario != "prepared" or ADAPTERS[name].prepares):
                yield scenario, name


class Runner:
    """Starts workers, tells how far it is, and remembers who could not be measured."""

    def __init__(self, worker: str, total: int) -> None:
        self._worker = _FOLDER / worker
        self._total = total
        self._started = 0
        self.measured: dict[str, list[dict[str, Any]]] = {}
        self.missing: dict[str, str] = {}  # adapter -> why

    def run(self, settings: Any, what: str) -> None:
        """Measures in a fresh process; a library that failed is left out from then on."""
        self._started += 1
        name: str = settings.adapter
        say(f"[{self._started}/{self._total}] {name}: {what}")
        if name in self.missing:
            say("  left out")
            return
        found, why = _in_process(self._worker, settings)
        if found is not None:
            self.measured.setdefault(name, []).append(found)
        if why:
            say(f"  {name}: {why}")
        if found is None or (why and name == OURS):
            self.missing[name] = why

    @property
    def status(self) -> int:
        """Of the benchmark: peers may be missing, this library may not."""
        return 1 if OURS in self.missing else 0


def say(text: str) -> None:
    """A line on how far it is."""
    print(text, file=sys.stderr, flush=True)


def pretouch(gib: float) -> None:
    """Touches and frees host memory, once for all processes; see README.md."""
    if gib:
        say(f"touching {gib:g} GiB of host memory")
        subprocess.run([sys.executable, str(_FOLDER / "machine.py"), str(gib)], check=True)


def command_of(script: str, words: Sequence[str]) -> list[str]:
    """The command line for the results: a file's name will do."""
    shown = [Path(word).name if "/" in word else word for word in words]
    return ["python", f"benchmarks/{script}", *shown]


def write_json(file: Path | None, record: Mapping[str, Any]) -> None:
    if file is not None:
        file.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")


def _in_process(worker: Path, settings: Any) -> tuple[dict[str, Any] | None, str]:
    """What was measured, if anything, and what went wrong, if anything."""
    with tempfile.TemporaryDirectory() as folder:
        target = Path(folder) / "measured.json"
        command = [sys.executable, str(worker), json.dumps(asdict(settings)), str(target)]
        try:
            status = subprocess.run(command, check=False, timeout=_LONGEST).returncode
        except subprocess.TimeoutExpired:
            return None, f"failed: its process took more than {_LONGEST:.0f} s"
        if not target.exists():
            return None, f"failed: its process ended with status {status}, before it had measured"
        found: dict[str, Any] = json.loads(target.read_text(encoding="utf-8"))
    if "unavailable" in found:
        return None, f"skipped: {found['unavailable']}"
    return found, f"its process ended with status {status}, after it had measured" if status else ""
