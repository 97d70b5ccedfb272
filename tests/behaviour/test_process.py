"""Do processes start and end well, in every state?"""

from __future__ import annotations

import pytest
from support import run_fresh, run_process

BUILD = """
import atexit, os, sys, threading
import torch
import cumem
device = cumem.default_device()
scope = cumem.use_memory_pool("weights")
scope.__enter__()
tensor = torch.arange(1000, device=device)
"""
AWAKE = BUILD + "scope.__exit__(None, None, None)\n"
ASLEEP = AWAKE + "cumem.sleep()\n"
STATES = {
    "inside a scope": BUILD,
    "awake": AWAKE,
    "asleep": ASLEEP,
    "discarded": AWAKE + "cumem.sleep(level=2)\n",
    "with kept contents": AWAKE + "cumem.keep(tensor)\ncumem.sleep(level=2)\n",
    "with a cycle of garbage": AWAKE + "cycle = [tensor]\ncycle.append(cycle)\ndel cycle, tensor\n",
}
ENDS = {
    "by sys.exit": "sys.exit(0)\n",
    "by os._exit": "os._exit(0)\n",
    "after a thread": "t = threading.Thread(target=cumem.stats)\nt.start()\nt.join()\n",
}


def test_importing_starts_no_driver() -> None:
    run_fresh(
        "import cumem\n"
        "from cumem import _runtime\n"
        "assert _runtime.if_started() is None\n"
        "assert not cumem.is_sleeping()\n"
        "cumem.sleep(); cumem.wake_up(); cumem.check(); cumem.stats()\n"
        "assert _runtime.if_started() is None\n",
        {"CUMEM_DRIVER": "nonsense"},
    )


def test_nothing_is_printed_by_a_whole_cycle() -> None:
    done = run_fresh(ASLEEP + "cumem.wake_up()\nassert tensor.sum().item() == 499500\n")
    assert done.stdout == ""


@pytest.mark.parametrize("state", STATES)
def test_a_process_ends_well_in_every_state(state: str) -> None:
    run_fresh(STATES[state])


@pytest.mark.parametrize("end", ENDS)
def test_a_process_ends_well_in_every_way(end: str) -> None:
    run_fresh(ASLEEP + ENDS[end])


def test_an_exception_inside_a_scope_ends_the_process_as_python_does() -> None:
    done = run_process(BUILD + "raise KeyError('mine')\n")
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1] == "KeyError: 'mine'"
    assert "cumem" not in done.stderr


def test_memory_may_be_used_in_an_exit_handler() -> None:
    done = run_fresh(
        ASLEEP
        + "def last():\n    cumem.wake_up()\n    print(tensor.sum().item())\n"
        + "atexit.register(last)\n"
    )
    assert done.stdout == "499500\n"


def test_the_emulated_machine_is_as_the_environment_says() -> None:
    run_fresh(
        "import torch, cumem\n"
        "for device in range(3):\n"
        "    with cumem.use_memory_pool('weights', device=device):\n"
        "        tensor = torch.ones(10)\n"
        "assert [d.total_bytes for d in cumem.stats().devices] == [64 << 20] * 3\n",
        {"CUMEM_EMULATED_CAPACITY": str(64 << 20), "CUMEM_EMULATED_DEVICES": "3"},
    )
