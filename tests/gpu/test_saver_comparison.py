"""Does the comparison with the original find what differs, and only that?"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

sys.path.append(str(Path(__file__).parent / "beside"))

from saver_comparison import Seen, observe, unlike, wrong
from saver_edges import ALL
from saver_machine import ENDS, Difference, Scenario

EXPECTED = {"first": True, "freed": 1.0, "last": "done"}


def scenario(**differs: Difference) -> Scenario:
    return Scenario(lambda saver, machine: iter(()), EXPECTED, differs)


def seen(ended: bool = False, **changes: Any) -> Seen:
    values = {**EXPECTED, **changes}
    return Seen({name: value for name, value in values.items() if value is not None}, ended)


def test_the_same_is_alike() -> None:
    assert wrong(scenario(), seen()) == []
    assert unlike(scenario(), seen(), seen(freed=1.02)) == []


@pytest.mark.parametrize(
    ("other", "told"),
    [
        (seen(first=False), "first: False, not True"),
        (seen(freed=0.9), "freed: 0.9, not 1.0"),
        (seen(freed=True), "freed: True, not 1.0"),
        (seen(last=None), "last: not seen"),
        (seen(error="ValueError: x"), "error: 'ValueError: x', which was not expected"),
        (seen(ended=True, last=None), "the process ended at 'last', not at None"),
        (seen(ended=True), "the process ended at 'its end', not at None"),
    ],
)
def test_whatever_differs_is_told(other: Seen, told: str) -> None:
    assert wrong(scenario(), other) == [told]
    assert unlike(scenario(), seen(), other) == [told]


def test_a_documented_difference_must_be_there() -> None:
    documented = scenario(first=Difference(theirs=False))
    assert unlike(documented, seen(), seen(first=False)) == []
    assert unlike(documented, seen(), seen()) == ["first: True, not False"]


def test_the_process_must_end_where_it_is_documented() -> None:
    documented = scenario(freed=Difference(ENDS))
    assert unlike(documented, seen(), seen(ended=True, freed=None, last=None)) == []
    too_late = unlike(documented, seen(), seen(ended=True, last=None))
    assert "the process ended at 'last', not at 'freed'" in too_late
    assert "the process ended at None, not at 'freed'" in unlike(documented, seen(), seen())


def test_what_depends_on_the_version_may_differ() -> None:
    documented = scenario(freed=Difference(ENDS, always=False))
    assert unlike(documented, seen(), seen()) == []
    assert unlike(documented, seen(), seen(ended=True, freed=None, last=None)) == []
    assert unlike(documented, seen(), seen(freed=0.0)) == ["freed: 0.0, not 1.0"]


def test_every_documented_difference_is_of_something_that_is_looked_at() -> None:
    for name, known in ALL.items():
        assert set(known.differs) <= set(known.expected), name


def test_scenarios_after_one_that_ends_the_process_run_in_another() -> None:
    started: list[list[str]] = []

    def start(library: str, names: Sequence[str]) -> tuple[list[dict[str, Any]], str]:
        started.append(list(names))
        lines: list[dict[str, Any]] = []
        for name in names:
            lines += [{"scenario": name}, {"scenario": name, "seen": "x", "value": True}]
            if name == "ends":
                break
            lines.append({"scenario": name, "finished": True})
        return lines, "status 1\n\nlast words"

    found = observe("some", ["before", "ends", "after"], start)
    assert started == [["before", "ends", "after"], ["after"]]
    assert {name: shown.ended for name, shown in found.items()} == {
        "before": False,
        "ends": True,
        "after": False,
    }
    assert found["ends"].last_words.endswith("last words")


def test_a_process_that_runs_nothing_is_an_error() -> None:
    with pytest.raises(AssertionError, match="some ran nothing: status 9"):
        observe("some", ["first"], lambda library, names: ([], "status 9"))


def test_a_library_that_is_not_there_is_told_for_all_scenarios() -> None:
    found = observe("some", ["a", "b"], lambda library, names: ([{"unavailable": "some"}], ""))
    assert [shown.missing for shown in found.values()] == ["some", "some"]
