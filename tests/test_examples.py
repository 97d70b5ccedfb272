"""Do the examples run as they are, on the emulator?"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent

# What an example prints when it went well; each takes a few seconds.
SAYS = {
    "rl_colocate.py": ("step 1: mean reward", "awake: rollout", "asleep: trainer"),
    "switch_models.py": ("small-talk: ", "0 failed"),
}


@pytest.mark.parametrize("name", sorted(SAYS))
def test_an_example_runs(name: str) -> None:
    done = subprocess.run(
        [sys.executable, "-W", "error", str(ROOT / "examples" / name)],
        env={**os.environ, "CUMEM_DRIVER": "emulated"},
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, ""), done.stderr
    for words in SAYS[name]:
        assert words in done.stdout, done.stdout
