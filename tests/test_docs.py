"""Do the examples of the documentation run as they are?"""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from support import run_fresh

DOCS = Path(__file__).parent.parent / "docs"


@pytest.mark.parametrize("name", ["models.md"])
def test_examples_run_one_after_the_other(name: str, tmp_path: Path) -> None:
    examples = re.findall(r"```python\n(.*?)```", (DOCS / name).read_text(), re.DOTALL)
    assert len(examples) > 3
    run_fresh("\n".join([f"import os\nos.chdir({str(tmp_path)!r})", *examples]))
