"""Do the examples of the documentation run as they are, on the emulator?"""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from support import run_fresh

DOCS = Path(__file__).parent.parent / "docs"
ONE_STORY = ("models.md",)  # each example goes on where the one before it ended
APART = ("migrating.md", "model_host.md")


def examples(page: str) -> list[str]:
    found = re.findall(r"^```python\n(.*?)^```", (DOCS / page).read_text(), re.DOTALL | re.M)
    assert found, page
    return found


@pytest.mark.parametrize("page", ONE_STORY)
def test_examples_run_one_after_the_other(page: str, tmp_path: Path) -> None:
    run_fresh("\n".join([f"import os\nos.chdir({str(tmp_path)!r})", *examples(page)]))


@pytest.mark.parametrize(
    "code",
    [
        pytest.param(code, id=f"{page}:{at}")
        for page in APART
        for at, code in enumerate(examples(page))
    ],
)
def test_an_example_runs_by_itself(code: str) -> None:
    run_fresh(code)
