"""Does a fork leave everything to the parent, and does the child hear what is wrong?"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from support import run_fresh

PARENT = """
import gc, json, os, signal, sys, threading, time
import torch
import cumem
with cumem.use_memory_pool("weights"):
    tensor = torch.arange(1_000_000)
with cumem.use_memory_pool("kv_cache"):
    kv = cumem.keep(torch.arange(1000))
expected = int(tensor.sum())

def in_child(work, seconds=30):
    # Returns how the child ended, and what it wrote.
    reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:
        signal.alarm(seconds)  # a child that waits for ever is a failure, not a hang
        os.close(reader)
        work(lambda text: os.write(writer, text.encode()))
        sys.exit(0)
    os.close(writer)
    with os.fdopen(reader) as pipe:
        said = pipe.read()
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), said

def outcome(call):
    def work(say):
        try:
            eval(call)
            say("None: no error")
        except Exception as error:
            say(f"{type(error).__name__}: {error}")
        os._exit(0)
    return work
"""

# Every public call that would touch a driver.
CALLS = [
    "cumem.sleep()",
    "cumem.sleep(level=2)",
    "cumem.wake_up()",
    "cumem.check()",
    "cumem.stats()",
    "cumem.trim()",
    "cumem.prepare(background=False)",
    "cumem.prepare(bytes=100).wait()",
    "cumem.use_memory_pool('weights').__enter__()",
    "cumem.graph_pool().__enter__()",
]
QUESTIONS = [
    "cumem.is_sleeping()",
    "cumem.is_mapped(tensor)",
    "cumem.tag_of(tensor)",
    "cumem.epoch('weights')",
    "cumem.default_device()",
]

MIDDLE = ["cumem.sleep()", "cumem.wake_up()", "cumem.stats()", "cumem.is_sleeping()"]

ENDS = {
    "by os._exit": "os._exit(0)",
    "by sys.exit": "sys.exit(0)",
    "at the end of its program": "None",
    "after its tensors died": "(globals().pop('tensor'), globals().pop('kv'), gc.collect())",
    "after a refused sleep": "quiet(cumem.sleep)",
    "after a collection and a trim": "(gc.collect(), quiet(cumem.trim))",
    "after it gave host memory back": "quiet(cumem.release_host_memory)",
}


def results(code: str) -> dict[str, Any]:
    return dict(json.loads(run_fresh(PARENT + code).stdout))


@pytest.fixture(scope="module")
def calls() -> dict[str, Any]:
    """How each call ended in a child of its own."""
    return results(
        f"print(json.dumps({{call: in_child(outcome(call)) for call in {CALLS + QUESTIONS!r}}}))\n"
    )


@pytest.fixture(scope="module")
def ends() -> dict[str, Any]:
    """For each end of a child: its status, and whether all of the parent's was intact."""
    return results(
        "def quiet(call):\n"
        "    try:\n"
        "        call()\n"
        "    except Exception:\n"
        "        pass\n"
        "def intact():\n"
        "    return int(tensor.sum()) == expected and int(kv.sum()) == 499500\n"
        "results = {}\n"
        "for asleep in (False, True):\n"
        f"    for name, end in {list(ENDS.items())!r}[:: 1 + 2 * asleep]:\n"
        "        if asleep:\n"
        "            cumem.sleep()\n"
        "        before = cumem.stats()\n"
        "        status, _ = in_child(lambda say: eval(end))\n"
        "        same = cumem.stats() == before\n"
        "        cumem.check()\n"
        "        cumem.wake_up()\n"
        "        whole = intact()\n"
        "        cumem.sleep()\n"
        "        cumem.wake_up()\n"
        "        results[f'{name}, {asleep}'] = [status, same, whole and intact()]\n"
        "print(json.dumps(results))\n"
    )


@pytest.fixture(scope="module")
def calls_in_the_middle() -> dict[str, Any]:
    """The same for children that were forked while another thread was in a long sleep."""
    return results(
        "from cumem import _emulator\n"
        "def forked_in_the_middle(call):\n"
        "    _emulator.library().set_bandwidth(0, 4 << 20)\n"
        "    mover = threading.Thread(target=cumem.sleep)\n"
        "    mover.start()\n"
        "    time.sleep(0.2)\n"
        "    assert mover.is_alive()\n"
        "    result = in_child(outcome(call))\n"
        "    _emulator.library().set_bandwidth(0, 0)\n"
        "    mover.join()\n"
        "    cumem.wake_up()\n"
        "    cumem.release_host_memory()\n"
        "    assert int(tensor.sum()) == expected\n"
        "    return result\n"
        f"print(json.dumps({{call: forked_in_the_middle(call) for call in {MIDDLE!r}}}))\n"
    )


@pytest.mark.parametrize(
    ("end", "asleep"), [*((end, False) for end in ENDS), *((end, True) for end in [*ENDS][::3])]
)
def test_a_forked_child_frees_nothing_of_its_parents(
    ends: dict[str, Any], end: str, asleep: bool
) -> None:
    status, same_books, same_bytes = ends[f"{end}, {asleep}"]
    assert (status, same_books, same_bytes) == (0, True, True)


@pytest.mark.parametrize("call", CALLS)
def test_a_call_in_a_forked_child_says_what_to_do(calls: dict[str, Any], call: str) -> None:
    """vllm#8893, vllm#12754: "cannot re-initialise CUDA in forked process"."""
    status, said = calls[call]
    assert status == 0
    assert said.startswith("DriverError: ")
    assert "fork" in said
    assert "spawn" in said


@pytest.mark.parametrize("call", QUESTIONS)
def test_a_question_in_a_forked_child_is_answered_or_refused(
    calls: dict[str, Any], call: str
) -> None:
    status, said = calls[call]
    assert status == 0
    assert said.startswith(("None: ", "DriverError: "))


@pytest.mark.parametrize("call", MIDDLE)
def test_a_child_forked_in_the_middle_of_a_sleep_does_not_wait_for_ever(
    calls_in_the_middle: dict[str, Any], call: str
) -> None:
    status, said = calls_in_the_middle[call]
    assert status == 0, "ended by the alarm"
    assert said.startswith("DriverError: ") or call == "cumem.is_sleeping()"


def test_a_fork_before_the_first_use_leaves_both_with_memory_of_their_own() -> None:
    run_fresh(
        "import os, torch, cumem\n"
        "pid = os.fork()\n"
        "with cumem.use_memory_pool('weights'):\n"
        "    tensor = torch.arange(1000)\n"
        "cumem.sleep()\n"
        "cumem.wake_up()\n"
        "assert tensor.sum().item() == 499500\n"
        "if pid:\n"
        "    assert os.waitpid(pid, 0)[1] == 0\n"
    )


def test_a_spawned_child_uses_memory_of_its_own(tmp_path: Path) -> None:
    script = tmp_path / "spawning.py"
    script.write_text(
        "import multiprocessing, sys\n"
        "import torch\n"
        "import cumem\n"
        "def cycle(connection):\n"
        "    with cumem.use_memory_pool('weights'):\n"
        "        tensor = torch.arange(1000)\n"
        "    cumem.sleep()\n"
        "    cumem.wake_up()\n"
        "    connection.send(tensor.sum().item())\n"
        "if __name__ == '__main__':\n"
        "    with cumem.use_memory_pool('weights'):\n"
        "        own = torch.arange(10)\n"
        "    context = multiprocessing.get_context('spawn')\n"
        "    ours, theirs = context.Pipe()\n"
        "    child = context.Process(target=cycle, args=(theirs,))\n"
        "    child.start()\n"
        "    assert ours.poll(60) and ours.recv() == 499500\n"
        "    child.join()\n"
        "    assert child.exitcode == 0\n"
        "    assert own.sum().item() == 45\n"
    )
    run_fresh(
        "import subprocess, sys\n"
        f"sys.exit(subprocess.run([sys.executable, {str(script)!r}], timeout=100).returncode)\n"
    )
