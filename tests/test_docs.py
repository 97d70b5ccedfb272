"""Do the examples of the documentation run as they are, on the emulator?"""

from __future__ import annotations

import re
from pathlib import Path
from types import ModuleType

import pytest
from support import run_fresh

import cumem
import cumem.serving

DOCS = Path(__file__).parent.parent / "docs"
ONE_STORY = (
    "README.md",
    "loading.md",
    "models.md",
    "performance.md",
)  # each example goes on where the one before it ended
APART = ("memory.md", "migrating.md", "model_host.md")


def examples(page: str, folder: Path = DOCS) -> list[str]:
    found = re.findall(r"^```python\n(.*?)^```", (folder / page).read_text(), re.DOTALL | re.M)
    assert found, page
    return found


@pytest.mark.parametrize("page", ONE_STORY)
def test_examples_run_one_after_the_other(page: str, tmp_path: Path) -> None:
    front = examples(page, DOCS.parent) if page == "README.md" else []  # the project's own
    run_fresh("\n".join([f"import os\nos.chdir({str(tmp_path)!r})", *front, *examples(page)]))


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


@pytest.mark.parametrize("module", [cumem, cumem.serving])
def test_every_public_name_has_its_line(module: ModuleType) -> None:
    described = re.findall(r"^\| `(\w+)` \|", (DOCS / "api.md").read_text(), re.M)
    assert set(module.__all__) <= set(described)


def test_the_index_has_every_page() -> None:
    linked = re.findall(r"^\| \[.*?\]\((\w+\.md)\)", (DOCS / "README.md").read_text(), re.M)
    assert sorted(linked) == sorted(
        page.name for page in DOCS.glob("*.md") if page.stem != "README"
    )
