"""What does ``python -m cumem report`` show?

The reports of processes that agreed to give theirs (:func:`cumem.serve_reports`). Of
any other process only a number can be known: the device memory it uses.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from cumem import _gpu_processes, answering
from cumem._text import amount
from cumem.errors import CumemError

_HOW = "call cumem.serve_reports() in the process that is to answer"


def lines(pid: int | None, *, as_json: bool) -> Iterator[str]:
    """The report of one process, or of all of this user's that answer.

    Raises:
        CumemError: nothing can be known; the message says what to do.
        OSError: a connection broke.
    """
    found = _all() if pid is None else {pid: _one(pid)}
    if as_json:
        reports = {number: answer["report"] for number, answer in found.items()}
        yield json.dumps(reports if pid is None else reports[pid], indent=2)
        return
    for number, answer in found.items():
        yield f"process {number}"
        yield from (f"  {line}" for line in str(answer["text"]).splitlines())


def _all() -> dict[int, dict[str, Any]]:
    asked = {pid: answering.ask(pid) for pid in answering.pids()}
    found = {pid: answer for pid, answer in asked.items() if answer is not None}
    if not found:
        raise CumemError(f"no process of this user answers; {_HOW}")
    return found


def _one(pid: int) -> dict[str, Any]:
    answer = answering.ask(pid)
    return answer if answer is not None else _seen_from_outside(pid)


def _seen_from_outside(pid: int) -> dict[str, Any]:
    """What the driver tells of a process that does not answer."""
    try:
        found = _gpu_processes.memory_of(pid)
    except CumemError as error:
        raise CumemError(f"process {pid} does not answer ({_HOW}), and {error}") from error
    if not found:
        raise CumemError(
            f"process {pid} does not answer ({_HOW}), and uses no GPU that is seen here"
        )
    told = [f"{device}: {amount(count)}" for device, count in found.items()]
    text = "\n".join([*told, f"It does not answer, so no more is known; {_HOW}."])
    return {"text": text, "report": {"used_bytes": found}}
