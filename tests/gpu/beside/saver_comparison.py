"""Do the drop-in and the original show the same, but for what is documented?

``observe`` runs scenarios in fresh processes; the others compare what was seen.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from saver_machine import ENDS, Scenario, Value

_WORKER = Path(__file__).parent / "saver_worker.py"
_SECONDS = 120.0
_WORDS = 300  # characters
_TOLERANCE = 0.05  # of a tensor, in what the driver says is free

Lines = list[dict[str, Any]]
Start = Callable[[str, Sequence[str]], tuple[Lines, str]]


@dataclass
class Seen:
    """What one library showed in one scenario.

    Attributes:
        values: by name, in order.
        ended: the process ended in it, or hung and was ended; ``last_words`` is the end
            of what it printed.
        missing: the capability that was not there; nothing was run.
    """

    values: dict[str, Value] = field(default_factory=dict)
    ended: bool = False
    last_words: str = ""
    missing: str = ""


def in_process(library: str, names: Sequence[str]) -> tuple[Lines, str]:
    """What a fresh process told, and how it ended."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "seen"
        file.touch()
        command = [sys.executable, str(_WORKER), library, str(file), *names]
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=_SECONDS)
            how = f"status {done.returncode}\n{done.stdout}\n{done.stderr}"
        except subprocess.TimeoutExpired:
            how = f"killed, since it took more than {_SECONDS} s"
        return [json.loads(line) for line in file.read_text().splitlines()], how


def observe(library: str, names: Sequence[str], start: Start = in_process) -> dict[str, Seen]:
    """Runs scenarios; where one ends the process, the others go on in another.

    Raises:
        AssertionError: a process ended before it began with a scenario.
    """
    found: dict[str, Seen] = {}
    left = list(names)
    while left:
        lines, how = start(library, left)
        unavailable = [line["unavailable"] for line in lines if "unavailable" in line]
        if unavailable:
            return found | {name: Seen(missing=unavailable[0]) for name in left}
        begun = _read(lines, how, found)
        if not begun:
            raise AssertionError(f"{library} ran nothing: {how}")
        left = [name for name in left if name not in begun]
    return found


def _read(lines: Lines, how: str, found: dict[str, Seen]) -> set[str]:
    """Adds what a process told; returns the scenarios that it began."""
    begun: set[str] = set()
    for line in lines:
        seen = found.setdefault(line["scenario"], Seen())
        begun.add(line["scenario"])
        if "value" in line:
            seen.values[line["seen"]] = line["value"]
        seen.missing = line.get("missing", "")
        seen.ended = not (seen.missing or line.get("finished", False))
        seen.last_words = _told(how)[-_WORDS:] if seen.ended else ""
    return begun


def _told(how: str) -> str:
    """Without the frames of a stack, which name places of one machine."""
    return "\n".join(line for line in how.strip().splitlines() if not line.startswith("frame #"))


def wrong(scenario: Scenario, drop_in: Seen) -> list[str]:
    """Where the drop-in does not show what is expected of it."""
    return list(_unlike(scenario.expected, drop_in, len(scenario.expected)))


def unlike(scenario: Scenario, drop_in: Seen, original: Seen) -> list[str]:
    """Where the original differs from the drop-in and it is not documented, or the reverse."""
    wanted: dict[str, Value] = dict(drop_in.values)
    for name, difference in scenario.differs.items():
        as_documented = _shown(scenario, original, name)
        if difference.always or _agree(as_documented, difference.theirs):
            wanted[name] = difference.theirs
    ends = [place for place, name in enumerate(wanted) if wanted[name] == ENDS]
    return list(_unlike(wanted, original, ends[0] if ends else len(wanted)))


def _shown(scenario: Scenario, seen: Seen, name: str) -> Value | None:
    """A value; ``ENDS`` where the process ended before it."""
    if name in seen.values or not seen.ended:
        return seen.values.get(name)
    return ENDS if _next(scenario.expected, seen) == name else None


def _next(wanted: Mapping[str, Value], seen: Seen) -> str:
    return next((name for name in wanted if name not in seen.values), "its end")


def _unlike(wanted: Mapping[str, Value], seen: Seen, count: int) -> Iterator[str]:
    """What of the first ``count`` values is not as wanted, and what else there is."""
    ends_at = list(wanted)[count] if count < len(wanted) else None
    for name in list(wanted)[:count]:
        if name in seen.values and not _agree(seen.values[name], wanted[name]):
            yield f"{name}: {seen.values[name]!r}, not {wanted[name]!r}"
        elif name not in seen.values and not seen.ended:
            yield f"{name}: not seen"
    for name in seen.values:
        if name not in list(wanted)[:count]:
            yield f"{name}: {seen.values[name]!r}, which was not expected"
    reached = _next(wanted, seen) if seen.ended else None
    if reached != ends_at:
        yield f"the process ended at {reached!r}, not at {ends_at!r}"


def _agree(one: Value | None, other: Value | None) -> bool:
    if isinstance(one, float) or isinstance(other, float):
        return type(one) is type(other) and abs(one - other) <= _TOLERANCE
    return one == other
