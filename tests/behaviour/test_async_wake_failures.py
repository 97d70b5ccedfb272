"""What does a wake that fails midway leave, and who is told?"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from support import (
    MIB,
    DriverUnderTest,
    contents_of,
    holds_pattern,
    in_thread,
    make,
    raw,
    run_fresh,
    run_process,
)

import cumem
from cumem.testing import EmulatedDriver

SIZES = (12 * MIB, 11 * MIB, 13 * MIB, 12 * MIB + 5)
ROOM = 26 * MIB  # for two of them


def asleep() -> list[torch.Tensor]:
    with cumem.use_memory_pool("weights"):
        tensors = [make(size, index) for index, size in enumerate(SIZES)]
    cumem.sleep()
    return tensors


def intact(tensors: list[torch.Tensor]) -> bool:
    return all(holds_pattern(tensor, seed) for seed, tensor in enumerate(tensors))


def awake(tensors: list[torch.Tensor]) -> list[int]:
    """Which are awake; those have their bytes."""
    found = [seed for seed, tensor in enumerate(tensors) if cumem.is_mapped(tensor)]
    assert all(holds_pattern(tensors[seed], seed) for seed in found)
    return found


def test_what_found_no_room_stays_asleep_with_its_backup(driver: DriverUnderTest) -> None:
    tensors = asleep()
    with driver.another_tenant(leaves=ROOM):
        handle = cumem.wake_up(wait=False)
        with pytest.raises(cumem.DeviceOutOfMemoryError, match="the rest is asleep"):
            handle.wait()
        assert awake(tensors) == [0, 1]
        assert cumem.sleeping_tags() == {"weights"}
        cumem.check()
    assert cumem.wake_up().tags == {"weights"}
    assert intact(tensors)


def test_who_waits_for_what_does_not_come_is_told(driver: DriverUnderTest) -> None:
    tensors = asleep()
    with driver.another_tenant(leaves=ROOM):
        handle = cumem.wake_up(wait=False)
        for tensor in tensors[2:]:
            with pytest.raises(cumem.DeviceOutOfMemoryError):
                handle.wait_for(tensor)
        with pytest.raises(cumem.DeviceOutOfMemoryError):
            handle.wait_for_tag("weights")
        for seed in (0, 1):
            handle.wait_for(tensors[seed])
            assert torch.equal(raw(tensors[seed]).cpu(), contents_of(tensors[seed], seed))
        with pytest.raises(cumem.DeviceOutOfMemoryError):
            handle.wait()
    cumem.wake_up()
    for tensor in tensors:  # a later wake has brought it
        handle.wait_for(tensor)
    assert intact(tensors)


def test_a_failure_is_raised_once_by_the_wait(driver: DriverUnderTest) -> None:
    tensors = asleep()
    with driver.another_tenant(leaves=ROOM):
        handle = cumem.wake_up(wait=False)
        with pytest.raises(cumem.DeviceOutOfMemoryError):
            handle.wait()
        assert handle.wait().tags == frozenset()
    cumem.wake_up()
    assert intact(tensors)


@pytest.mark.parametrize(
    "call",
    [
        cumem.sleep,
        cumem.wake_up,
        lambda: cumem.wake_up(wait=False),
        lambda: cumem.switch(sleep_tags=["weights"], wake_tags=[]),
    ],
    ids=["sleep", "wake_up", "wake_up without waiting", "switch"],
)
def test_a_failure_that_nobody_saw_is_raised_once_by_the_next_call(
    driver: DriverUnderTest, call: Callable[[], object]
) -> None:
    tensors = asleep()
    with driver.another_tenant(leaves=ROOM):
        handle = cumem.wake_up(wait=False)
        with pytest.raises(cumem.DeviceOutOfMemoryError):
            call()
        assert handle.done()
        assert awake(tensors) == [0, 1]
    handle.wait()
    cumem.wake_up()
    assert intact(tensors)


def test_hooks_hear_of_what_is_awake_also_when_the_rest_is_not(driver: DriverUnderTest) -> None:
    tensors = asleep()
    told: list[int] = []
    registered = cumem.on_after_map(
        lambda segments: told.extend(segment.address for segment in segments)
    )
    with driver.another_tenant(leaves=ROOM):
        with pytest.raises(cumem.DeviceOutOfMemoryError):
            cumem.wake_up(wait=False).wait()
        assert told == [tensor.data_ptr() for tensor in tensors[:2]]
    cumem.wake_up()
    registered.remove()
    assert told == [tensor.data_ptr() for tensor in tensors]


def test_contents_that_were_lost_are_undefined_once(driver: DriverUnderTest) -> None:
    tensors = asleep()
    cumem.wake_up()
    cumem.sleep(level=2)
    with driver.another_tenant(leaves=ROOM), pytest.raises(cumem.DeviceOutOfMemoryError):
        cumem.wake_up(wait=False).wait()
    assert cumem.wake_up().undefined == {"weights"}
    cumem.sleep()
    assert cumem.wake_up().undefined == frozenset()
    del tensors


@pytest.mark.needs("failures on demand")
@pytest.mark.parametrize("call", ["cuMemGetInfo", "cuMemMap", "cuMemcpyHtoDAsync", "cuEventRecord"])
def test_every_failure_reaches_those_who_wait(emulator: EmulatedDriver, call: str) -> None:
    tensors = asleep()
    emulator.fail(call, 1, "CUDA_ERROR_UNKNOWN")
    handle = cumem.wake_up(wait=False)

    def wait_for_last() -> None:
        with pytest.raises(cumem.DriverError):
            handle.wait_for(tensors[3])

    in_thread(wait_for_last)
    with pytest.raises(cumem.DriverError):
        handle.wait()
    awake(tensors)
    cumem.wake_up()
    assert intact(tensors)


@pytest.mark.needs("captures without a GPU")
def test_a_capture_refuses_it_at_once(emulator: EmulatedDriver) -> None:
    tensors = asleep()
    emulator.begin_capture()
    with pytest.raises(cumem.BusyError, match="capture"):
        cumem.wake_up(wait=False)
    emulator.end_capture()
    assert awake(tensors) == []
    cumem.wake_up(wait=False).wait()
    assert intact(tensors)


def test_a_system_without_threads_leaves_everything_as_it_was(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    tensors = asleep()
    with monkeypatch.context() as patch:
        patch.setattr("threading.Thread.start", _no_thread)
        with pytest.raises(RuntimeError, match="no thread"):
            cumem.wake_up(wait=False)
    assert awake(tensors) == []
    cumem.wake_up()
    assert intact(tensors)


def _no_thread(_self: object) -> None:
    raise RuntimeError("no thread for you")


# The end of the process

SLOW = """
import os, sys
import torch
import cumem
from cumem.testing import EmulatedDriver
device = cumem.default_device()
with cumem.use_memory_pool("weights"):
    tensors = [torch.arange(1_500_000, device=device) for _ in range(4)]
cumem.sleep()
EmulatedDriver(0).set_bandwidth(80 << 20)
handle = cumem.wake_up(wait=False)
"""


@pytest.mark.parametrize(
    "end", ["", "sys.exit(0)\n", "os._exit(0)\n", "handle.wait_for(tensors[1])\n", "del handle\n"]
)
def test_a_process_may_end_while_it_wakes(end: str) -> None:
    run_fresh(SLOW + end)


def test_an_exception_ends_a_process_that_wakes_as_python_does() -> None:
    done = run_process(SLOW + "raise KeyError('mine')\n")
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1] == "KeyError: 'mine'"


def test_a_process_may_end_while_host_memory_is_made() -> None:
    run_fresh("import cumem\ncumem.default_device()\ncumem.prepare(bytes=1 << 30)\n")
