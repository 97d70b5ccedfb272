"""Are allocations captured where torch uses expandable segments, and is the setting left alone?

With expandable segments torch maps memory itself. The setting comes from either of
two environment names or is made at run time; each way gets a process of its own.
"""

from __future__ import annotations

import os
import subprocess
import sys

import torch
from harness import need, run
from support import CUDA, DEVICE, MIB, fill, holds, in_thread

import cumem

SETTING = "expandable_segments:True"
NAMES = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
INSIDE = "--in-child"
# Torch says so itself where it is given the older name.
DEPRECATION = "PYTORCH_CUDA_ALLOC_CONF is deprecated"


def in_child(way: str, environment: dict[str, str]) -> None:
    need(CUDA, "CUDA device")
    inherited = {name: value for name, value in os.environ.items() if name not in NAMES}
    done = subprocess.run(
        [sys.executable, __file__, INSIDE, way],
        env={**inherited, **environment},
        capture_output=True,
        text=True,
        timeout=120,
    )
    noise = [line for line in done.stderr.splitlines() if line and DEPRECATION not in line]
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    assert not noise, noise


def set_by_the_newer_name() -> None:
    in_child("environment", {"PYTORCH_ALLOC_CONF": SETTING})


def set_by_the_older_name() -> None:
    in_child("environment", {"PYTORCH_CUDA_ALLOC_CONF": SETTING})


def set_among_other_settings() -> None:
    other = f"garbage_collection_threshold:0.9,{SETTING},max_split_size_mb:512"
    in_child("environment", {"PYTORCH_ALLOC_CONF": other})


def set_at_run_time() -> None:
    in_child("run time", {})


def is_expandable(tensor: torch.Tensor) -> bool:
    """Does torch map the memory of this tensor itself?"""
    at = tensor.data_ptr()
    for segment in torch.cuda.memory_snapshot(include_traces=False):
        if segment["address"] <= at < segment["address"] + segment["total_size"]:
            return bool(segment["is_expandable"])
    raise AssertionError("torch does not know this tensor")


def fresh(size: int = 30 * MIB) -> torch.Tensor:
    return torch.empty(size, dtype=torch.uint8, device=DEVICE)


def settings() -> str:
    snapshot = torch._C._cuda_memorySnapshot((0, 0, False))
    return str(snapshot["allocator_settings"]["PYTORCH_CUDA_ALLOC_CONF"])


def outside_is_expandable() -> None:
    torch.cuda.empty_cache()  # no block of an earlier kind is used again
    assert is_expandable(fresh())


def captured_in_nested_scopes() -> None:
    before = settings()
    with cumem.use_memory_pool("weights"):
        first = fresh()
        with cumem.use_memory_pool("kv_cache"):
            second = fresh()
        third = fresh()
    tensors = [first, second, third]
    assert [cumem.tag_of(tensor) for tensor in tensors] == ["weights", "kv_cache", "weights"]
    assert not any(is_expandable(tensor) for tensor in tensors)
    assert settings() == before
    outside_is_expandable()
    for seed, tensor in enumerate(tensors):
        fill(tensor, seed)
    cumem.sleep()
    cumem.wake_up()  # what is set up once is set up
    free = torch.cuda.mem_get_info()[0]
    cumem.sleep()
    assert torch.cuda.mem_get_info()[0] - free >= 90 * MIB
    cumem.wake_up()
    assert holds(first, 0)
    assert holds(third, 2)


def restored_after_an_exception() -> None:
    before = settings()
    try:
        with cumem.use_memory_pool("weights"), cumem.use_memory_pool("kv_cache"):
            raise KeyError("on purpose")
    except KeyError:
        pass
    assert settings() == before
    outside_is_expandable()


def restored_after_scopes_of_two_threads() -> None:
    before = settings()
    with cumem.use_memory_pool("weights"):
        mine = fresh()

        def other() -> torch.Tensor:
            with cumem.use_memory_pool("weights"):
                return fresh()

        theirs = in_thread(other)
        assert isinstance(theirs, torch.Tensor)
        later = fresh()  # the other thread's scope has ended, this one has not
    tensors = [mine, theirs, later]
    assert {cumem.tag_of(tensor) for tensor in tensors} == {"weights"}
    assert settings() == before
    outside_is_expandable()


def main(way: str) -> None:
    if way == "run time":
        torch.empty(1, device=DEVICE)
        torch._C._accelerator_setAllocatorSettings(SETTING)
    sys.argv[1:] = []
    run(
        [
            outside_is_expandable,
            captured_in_nested_scopes,
            restored_after_an_exception,
            restored_after_scopes_of_two_threads,
        ]
    )


if __name__ == "__main__":
    if sys.argv[1:2] == [INSIDE]:
        os.environ.pop("CUMEM_RESULTS", None)  # the parent writes the results
        main(sys.argv[2])
    run(
        [
            set_by_the_newer_name,
            set_by_the_older_name,
            set_among_other_settings,
            set_at_run_time,
        ]
    )
