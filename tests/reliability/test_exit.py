"""Does a process end well, whatever is under way?"""

from __future__ import annotations

from concurrent.futures import Future, ThreadPoolExecutor

import pytest
from support import run_process

BUILD = """
import atexit, os, sys, threading, time
import torch
import cumem
from cumem import _emulator
with cumem.use_memory_pool("weights"):
    tensor = torch.arange(1_000_000)
def slow():
    _emulator.library().set_bandwidth(0, 10 << 20)
def on_a_daemon(call):
    threading.Thread(target=call, daemon=True).start()
    time.sleep(0.3)
"""
EXITING_THREAD = """
def work():
    with cumem.use_memory_pool('draft'):
        kept.append(torch.ones(10))
        sys.exit(3)
kept = []
for state in (lambda: None, cumem.sleep, lambda: cumem.sleep(level=2)):
    state()
    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    cumem.sleep()
    cumem.wake_up()
"""
OPEN_SCOPE = """
opened = threading.Event()
def work():
    with cumem.use_memory_pool('draft'):
        kept = torch.ones(10)
        opened.set()
        time.sleep(3600)
threading.Thread(target=work, daemon=True).start()
opened.wait(60)
"""
HOOKS = """
model = torch.nn.Linear(2, 2)
cumem.guard(model)
cumem.on_before_unmap(lambda segments: None)
cumem.on_after_map(lambda segments: None)
cumem.sleep()
"""

VARIANTS = {
    "after threads that exited inside a scope": EXITING_THREAD,
    "while another thread has a scope open": OPEN_SCOPE,
    "by sys.exit while another thread has a scope open": OPEN_SCOPE + "sys.exit(0)\n",
    "asleep, with hooks and a guard": HOOKS,
    "while host memory is prepared": "cumem.prepare(bytes=300 << 20)\n",
    "by sys.exit while host memory is prepared": "cumem.prepare(bytes=300 << 20)\nsys.exit(0)\n",
    "by os._exit while host memory is prepared": "cumem.prepare(bytes=300 << 20)\nos._exit(0)\n",
    "with a preparation begun at exit": (
        "atexit.register(lambda: cumem.prepare(bytes=300 << 20))\n"
    ),
    "in the middle of a sleep on a daemon thread": "slow()\non_a_daemon(cumem.sleep)\n",
    "in the middle of a wake on a daemon thread": (
        "cumem.sleep()\nslow()\non_a_daemon(cumem.wake_up)\n"
    ),
    "in the middle of a wake that nobody waits for": (
        "cumem.sleep()\nslow()\ncumem.wake_up(wait=False)\n"
    ),
}


@pytest.fixture(scope="module")
def ends() -> dict[str, Future[tuple[int, str]]]:
    """Status and stderr of each process; two run at a time."""

    def run(code: str) -> tuple[int, str]:
        done = run_process(BUILD + code)
        return done.returncode, done.stderr

    with ThreadPoolExecutor(2) as executor:
        return {name: executor.submit(run, code) for name, code in VARIANTS.items()}


@pytest.mark.parametrize("variant", VARIANTS)
def test_a_process_ends_well_and_silently(
    ends: dict[str, Future[tuple[int, str]]], variant: str
) -> None:
    """vllm#46050: "pure virtual method called" at the end of a process."""
    assert ends[variant].result() == (0, "")


def test_an_exception_that_ends_a_sleeping_process_is_all_that_is_said() -> None:
    done = run_process(BUILD + "cumem.sleep()\nraise KeyError('mine')\n")
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1] == "KeyError: 'mine'"
    assert "cumem" not in done.stderr
