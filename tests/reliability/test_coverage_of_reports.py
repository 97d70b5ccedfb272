"""Is every public report shown by a test that exists, or said to be out of reach?"""

from __future__ import annotations

import ast
from functools import cache
from pathlib import Path

import pytest
from coverage_of_reports import COVERED, ENTRIES, NOT_EXPRESSED, ON_A_GPU

ROOT = Path(__file__).parents[2]
REPORTS = [f"{letter}{number}" for letter, all_ in ENTRIES.items() for number in all_.split()]


@cache
def functions_of(file: str) -> frozenset[str]:
    tree = ast.parse((ROOT / file).read_text())
    return frozenset(node.name for node in tree.body if isinstance(node, ast.FunctionDef))


@pytest.mark.parametrize("report", REPORTS)
def test_every_report_has_a_test_or_a_reason(report: str) -> None:
    assert report in COVERED or report in ON_A_GPU or report in NOT_EXPRESSED


@pytest.mark.parametrize("report", [*COVERED, *ON_A_GPU])
def test_the_tests_of_a_report_exist(report: str) -> None:
    for test in [*COVERED.get(report, ()), *ON_A_GPU.get(report, ())]:
        file, _, name = test.partition("::")
        assert name in functions_of(file), test


def test_nothing_is_both_shown_and_out_of_reach() -> None:
    assert set(COVERED) | set(ON_A_GPU) | set(NOT_EXPRESSED) == set(REPORTS)
    assert not NOT_EXPRESSED.keys() & (COVERED.keys() | ON_A_GPU.keys())
    assert all(NOT_EXPRESSED.values())
