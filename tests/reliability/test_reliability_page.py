"""Does every test that the page of guarantees names exist?"""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "reliability.md"
NAMED = sorted(set(re.findall(r"`(tests/[\w/]+\.(?:py|cpp))::(\w+)`", PAGE.read_text())))


def test_every_line_of_the_guarantees_names_a_test() -> None:
    lines = [line for line in PAGE.read_text().splitlines() if line.startswith("| ")][1:]
    assert len(lines) > 20
    assert [line for line in lines if not re.search(r"`tests/[\w/.]+::\w+`", line)] == []


@pytest.mark.parametrize(("file", "name"), NAMED)
def test_every_test_that_is_named_exists(file: str, name: str) -> None:
    text = (ROOT / file).read_text()
    definition = rf"^def {name}\(" if file.endswith(".py") else rf"^TEST\({name}\)"
    assert re.search(definition, text, re.MULTILINE), f"{file} has no {name}"
