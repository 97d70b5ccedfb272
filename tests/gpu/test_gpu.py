"""Does cumem hold on a real GPU? Each group of checks runs in a fresh process.

A group is a script in ``groups/``; it can be run by itself, with the names of checks
as arguments. It must end with status 0 and write nothing to stderr. With
CUMEM_RESULTS set to a folder, each group leaves its results there as JSON.
"""

from __future__ import annotations

import importlib.util
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch

GROUPS = Path(__file__).parent / "groups"
HELPERS = {"harness", "support", "cuda_oracle", "witness"}

# Seconds that a group may take.
LIMITS = {
    "captures": 180,
    "compiled": 400,
    "contents": 240,
    "demo": 500,
    "exits": 400,
    "expandable": 240,
    "graphs": 180,
    "oom": 240,
    "oracle": 180,
    "other_process": 400,
    "pools": 240,
    "soak": 400,
    "streams": 180,
    "torch_memory_saver": 240,
    "torch_memory_saver_beside": 500,
    "two_gpus": 240,
    "vllm_allocator": 240,
}
_SOAK_CYCLES = 40  # of the default; more take longer

# Said by packages around torch when they are imported, in whatever process.
_IGNORED_WARNINGS = "ignore:The pynvml package is deprecated:FutureWarning"


def missing() -> str:
    """The capability that this machine lacks; empty when it lacks none."""
    if not torch.cuda.is_available():
        return "CUDA device"
    if importlib.util.find_spec("cuda") is None or not importlib.util.find_spec("cuda.bindings"):
        return "cuda-python (pip install cuda-python)"
    return ""


def limit_of(group: str) -> int:
    cycles = int(os.environ.get("CUMEM_SOAK_CYCLES", _SOAK_CYCLES))
    return LIMITS[group] * max(1, cycles // _SOAK_CYCLES if group == "soak" else 1)


def run_group(group: str) -> tuple[int | None, str, str]:
    """Status (None: it took too long), stdout and stderr of a group in a fresh process."""
    process = subprocess.Popen(
        [sys.executable, str(GROUPS / f"{group}.py")],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "CUMEM_DRIVER": "cuda", "PYTHONWARNINGS": _IGNORED_WARNINGS},
        start_new_session=True,  # so that its own children can be ended with it
    )
    try:
        out, err = process.communicate(timeout=limit_of(group))
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        out, err = process.communicate()
        return None, out, err
    return process.returncode, out, err


def is_skipped(out: str) -> bool:
    """Was every check of the group skipped?"""
    words = [line.split(" ", 1)[0] for line in out.splitlines() if line[:4] in _RESULTS]
    return bool(words) and set(words) == {"skip"}


_RESULTS = ("ok  ", "skip", "FAIL")


def groups() -> list[object]:
    return [
        pytest.param(group, marks=pytest.mark.timeout(limit_of(group) + 30))
        for group in sorted(LIMITS)
    ]


@pytest.mark.gpu
@pytest.mark.skipif(missing() != "", reason=f"capability: no {missing()}")
@pytest.mark.parametrize("group", groups())
def test_group(group: str) -> None:
    status, out, err = run_group(group)
    print(out)
    if status is None:
        pytest.fail(f"still running after {limit_of(group)} s\n{out}\n{err}", pytrace=False)
    if status != 0 or err.strip():
        pytest.fail(f"status {status}\n{out}\nstderr: {err or '(empty)'}", pytrace=False)
    if is_skipped(out):
        reason = next(line for line in out.splitlines() if line.startswith("skip"))
        pytest.skip(f"capability: {reason.rpartition(': ')[2]}")


def test_every_group_has_a_limit() -> None:
    assert {path.stem for path in GROUPS.glob("*.py")} - HELPERS == set(LIMITS)
