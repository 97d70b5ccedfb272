"""How does a group run its checks and tell what holds?

A group is a plain script: it hands its check functions to :func:`run`, which
calls each in turn, tidies up after it, prints one line for it, and ends the
process with status 0 when all held. Nothing goes to stderr, so that whatever
turns up there came from the code under test.
"""

from __future__ import annotations

import gc
import json
import os
import platform
import re
import sys
import time
import traceback
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, NoReturn

import torch

import cumem

Check = Callable[[], None]


class MissingError(Exception):
    """A named capability that a check needs is not there."""


@dataclass
class Outcome:
    """What became of one check."""

    name: str
    ok: bool = True
    seconds: float = 0.0
    skipped: str = ""  # the capability that is missing
    notes: list[str] = field(default_factory=list)

    def __str__(self) -> str:
        word = "skip" if self.skipped else "ok  " if self.ok else "FAIL"
        reason = f": no {self.skipped}" if self.skipped else ""
        return f"{word} {self.name} {self.seconds:.2f} s{reason}"


_notes: list[str] = []


def need(present: object, capability: str) -> None:
    """Skips the check that calls it unless ``present`` is true."""
    if not present:
        raise MissingError(capability)


def note(text: str) -> None:
    """Keeps a fact with the result of the check that calls it."""
    _notes.append(text)


def expect(error: type[BaseException], call: Callable[[], object]) -> str:
    """The text of the ``error`` that ``call`` raises; fails when it raises none."""
    try:
        call()
    except error as raised:
        return str(raised)
    raise AssertionError(f"{error.__name__} was expected, and nothing was raised")


def run(checks: Iterable[Check]) -> NoReturn:
    """Runs checks in order; ends the process, with status 1 when one failed.

    Names on the command line choose among them.
    """
    chosen = [check for check in checks if len(sys.argv) < 2 or check.__name__ in sys.argv[1:]]
    if not chosen:
        print(f"no check is called {' or '.join(sys.argv[1:])}")
        sys.exit(2)
    outcomes = []
    for check in chosen:
        outcomes.append(_run_one(check))
        if not outcomes[-1].ok and not _device_lives():
            print("the device does not answer any more; the checks that are left are not run")
            break
    _write_results(outcomes)
    sys.exit(0 if all(outcome.ok for outcome in outcomes) else 1)


def _run_one(check: Check) -> Outcome:
    _notes.clear()
    outcome = Outcome(check.__name__)
    started = time.perf_counter()
    for step in (check, tidy):
        try:
            step()
        except MissingError as missing:
            outcome.skipped = str(missing)
        except BaseException:  # noqa: BLE001 - a check that calls sys.exit has failed, too
            outcome.ok = False
            print(traceback.format_exc())
    outcome.seconds = round(time.perf_counter() - started, 3)
    outcome.notes = list(_notes)
    print(outcome, flush=True)
    for text in outcome.notes:
        print(f"       {text}", flush=True)
    return outcome


def tidy() -> None:
    """Wakes everything, gives back what nothing uses, and proves the books."""
    gc.collect()
    cumem.configure(cumem.Options())
    if torch.cuda.is_initialized():
        torch.cuda.synchronize()
    if cumem.is_sleeping():
        cumem.wake_up()
    cumem.trim()
    cumem.check()


def _device_lives() -> bool:
    try:
        if torch.cuda.is_initialized():
            torch.cuda.synchronize()
    except RuntimeError:
        return False
    return True


def environment() -> dict[str, Any]:
    """The machine and the versions, for the results."""
    facts: dict[str, Any] = {
        "cumem": cumem.__version__,
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.machine()}",
        "processors": os.cpu_count(),
    }
    if torch.cuda.is_initialized():
        count = torch.cuda.device_count()
        facts["devices"] = [torch.cuda.get_device_name(index) for index in range(count)]
        facts["driver"] = _driver_version()
    return facts


def _driver_version() -> str:
    try:
        text = Path("/proc/driver/nvidia/version").read_text(encoding="utf-8")
    except OSError:
        return "unknown"
    found = re.search(r"\d+\.\d+(\.\d+)?", text)
    return found.group() if found else "unknown"


def _write_results(outcomes: Sequence[Outcome]) -> None:
    folder = os.environ.get("CUMEM_RESULTS")
    if not folder:
        return
    group = Path(sys.argv[0]).stem
    record = {
        "group": group,
        "environment": environment(),
        "checks": [asdict(outcome) for outcome in outcomes],
    }
    target = Path(folder)
    target.mkdir(parents=True, exist_ok=True)
    (target / f"gpu-{group}.json").write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
