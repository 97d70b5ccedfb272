"""Does every example in these pages run as it is, on the emulator?"""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from support import run_fresh

DOCS = Path(__file__).parent.parent / "docs"
PAGES = ("migrating.md", "model_host.md")


def blocks() -> list[object]:
    found = []
    for page in PAGES:
        codes = re.findall(r"^```python\n(.*?)^```", (DOCS / page).read_text(), re.DOTALL | re.M)
        assert codes, page
        found += [pytest.param(code, id=f"{page}:{at}") for at, code in enumerate(codes)]
    return found


@pytest.mark.parametrize("code", blocks())
def test_a_block_runs(code: str) -> None:
    run_fresh(code)
