"""Does a process end as it should, however it ends and whatever cumem holds then?

Each variant is a process of its own: its exit status is checked, and that there is
nothing on its stderr but what Python itself writes there.
"""

from __future__ import annotations

import subprocess
import sys
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

from harness import Check, need, run
from support import CUDA

AT_ONCE = 8
SECONDS = 120

PREAMBLE = """
import os, sys, threading
import torch
import cumem
DEVICE = cumem.default_device()
def make(tag="weights", size=30 << 20):
    with cumem.use_memory_pool(tag):
        return torch.ones(size, dtype=torch.uint8, device=DEVICE)
def captured(pool=None):
    x = torch.ones(256, 256, device=DEVICE)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        x @ x
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, pool=pool, stream=stream):
        y = torch.relu(x @ x)
    return graph, x, y
tensor = make()
"""


@dataclass(frozen=True)
class Variant:
    """How one process ends."""

    name: str
    code: str
    status: int = 0
    traceback: str = ""  # the last line of the traceback that Python writes
    cuda: bool = False  # needs graphs


VARIANTS = (
    Variant("awake", "pass"),
    Variant("asleep", "cumem.sleep()"),
    Variant("asleep_without_contents", "cumem.sleep(level=2)"),
    Variant("after_many_cycles", "for _ in range(20): cumem.sleep(); cumem.wake_up()"),
    Variant("tensors_dropped_asleep", "cumem.sleep(); del tensor"),
    Variant("trimmed", "del tensor; cumem.trim()"),
    Variant("partly_asleep", "kv = make('kv_cache'); cumem.sleep(tags=['weights'])"),
    Variant(
        "inside_a_scope",
        "with cumem.use_memory_pool('weights'):\n    more = make('kv_cache')\n    sys.exit(0)",
    ),
    Variant(
        "inside_a_scope_without_leaving_it",
        "scope = cumem.use_memory_pool('weights')\nscope.__enter__()\n"
        "more = torch.ones(5 << 20, device=DEVICE)",
    ),
    Variant(
        "inside_a_scope_with_another_tag_asleep",
        "cumem.sleep()\nwith cumem.use_memory_pool('kv_cache'):\n"
        "    more = torch.ones(5 << 20, device=DEVICE)\n    sys.exit(0)",
    ),
    Variant("status_seven", "cumem.sleep(); sys.exit(7)", status=7),
    Variant(
        "exit_of_a_thread",
        "thread = threading.Thread(target=lambda: (cumem.sleep(), sys.exit(5)))\n"
        "thread.start(); thread.join()",
    ),
    Variant(
        "with_a_daemon_thread_in_a_scope",
        "import time\ndef stay():\n    with cumem.use_memory_pool('kv_cache'):\n"
        "        global more\n        more = torch.ones(5 << 20, device=DEVICE)\n"
        "        entered.set(); time.sleep(600)\n"
        "entered = threading.Event()\n"
        "threading.Thread(target=stay, daemon=True).start(); entered.wait(60)",
    ),
    Variant(
        "exception",
        "cumem.sleep(); raise RuntimeError('on purpose')",
        status=1,
        traceback="RuntimeError: on purpose",
    ),
    Variant(
        "exception_inside_a_scope",
        "with cumem.use_memory_pool('weights'):\n    raise RuntimeError('on purpose')",
        status=1,
        traceback="RuntimeError: on purpose",
    ),
    Variant("at_once", "cumem.sleep(); os._exit(3)", status=3),
    Variant("at_once_awake", "os._exit(3)", status=3),
    Variant("with_a_graph", "kept = captured()", cuda=True),
    Variant(
        "with_a_graph_in_a_pool",
        "with cumem.graph_pool('graphs') as pool: kept = captured(pool.id)",
        cuda=True,
    ),
    Variant(
        "with_a_graph_in_a_pool_asleep",
        "with cumem.graph_pool('graphs') as pool: kept = captured(pool.id)\ncumem.sleep()",
        cuda=True,
    ),
    Variant(
        "after_a_fork",
        "import warnings; warnings.simplefilter('ignore')\n"
        "cumem.sleep()\nchild = os.fork()\nif child == 0: sys.exit(0)\n"
        "status = os.waitpid(child, 0)[1]\nassert status == 0, status\n"
        "cumem.wake_up(); assert tensor.eq(1).all()",
    ),
    Variant(
        "after_a_fork_that_is_told_so",
        "import warnings; warnings.simplefilter('ignore')\nchild = os.fork()\n"
        "if child == 0:\n"
        "    try: cumem.sleep()\n"
        "    except cumem.DriverError as error: os._exit(0 if 'fork' in str(error) else 4)\n"
        "    os._exit(5)\n"
        "status = os.waitpid(child, 0)[1]\nassert status == 0, status\n"
        "cumem.sleep(); cumem.wake_up(); assert tensor.eq(1).all()",
    ),
    Variant(
        "with_spawned_child_that_sleeps",
        "import subprocess\n"
        "code = 'import torch, cumem\\nwith cumem.use_memory_pool(\"weights\"):\\n'\\\n"
        "    '    t = torch.ones(100, device=cumem.default_device())\\ncumem.sleep()'\n"
        "done = subprocess.run([sys.executable, '-c', code])\n"
        "assert done.returncode == 0",
    ),
)


def fault_of(variant: Variant) -> str:
    """What is wrong about the end of a process; empty when nothing is."""
    try:
        done = subprocess.run(
            [sys.executable, "-c", PREAMBLE + variant.code],
            capture_output=True,
            text=True,
            timeout=SECONDS,
        )
    except subprocess.TimeoutExpired:
        return f"{variant.name}: still running after {SECONDS} s"
    stderr = done.stderr.strip()
    if done.returncode != variant.status:
        return f"{variant.name}: status {done.returncode}, not {variant.status}: {stderr}"
    if not variant.traceback:
        return f"{variant.name}: on stderr: {stderr}" if stderr else ""
    lines = stderr.splitlines() or [""]
    only_traceback = lines[0].startswith("Traceback") and lines[-1] == variant.traceback
    return "" if only_traceback else f"{variant.name}: more than a traceback: {stderr}"


def as_check(variant: Variant, fault: Future[str]) -> Check:
    """The check of one variant, whose process runs beside those of the others."""

    def check() -> None:
        need(CUDA or not variant.cuda, "CUDA device")
        text = fault.result()
        assert not text, text

    check.__name__ = variant.name
    return check


if __name__ == "__main__":
    with ThreadPoolExecutor(AT_ONCE) as runners:
        chosen = [one for one in VARIANTS if len(sys.argv) < 2 or one.name in sys.argv[1:]]
        ready = [one for one in chosen if CUDA or not one.cuda]
        faults = {one.name: runners.submit(fault_of, one) for one in ready}
        run([as_check(one, faults.get(one.name, Future())) for one in chosen])
