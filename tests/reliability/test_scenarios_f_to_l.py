"""Public reports F to L: torch, registrations, graphs, platforms, speed, packaging."""

from __future__ import annotations

import gc
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from support import (
    GRANULE,
    MIB,
    DriverUnderTest,
    fill_pattern,
    holds_pattern,
    in_thread,
    make,
    run_fresh,
)

import cumem
from cumem import _C, _runtime
from cumem._emulator import error_code, library

# A whole cycle in a process of its own.
CYCLE = """
import os, sys
started_with = set(os.listdir('/proc/self/fd'))
def before_and_after():
    open_now = set(os.listdir('/proc/self/fd')) - started_with
    return [fd for fd in open_now if os.path.lexists(f'/proc/self/fd/{fd}')]
import torch, cumem
with cumem.use_memory_pool('weights'):
    tensor = torch.arange(1000)
cumem.sleep()
cumem.wake_up()
assert tensor.sum().item() == 499500
"""


def test_hundreds_of_cycles_leave_the_counts_of_python_alone() -> None:
    """F1, vllm#22724, vllm#23477, OpenRLHF#1052: "deallocating None" after a thousand steps."""
    with cumem.use_memory_pool("weights"):
        tensor = make(100, 1)
    gc.collect()
    before = sys.getrefcount(None)
    for _ in range(300):
        cumem.sleep()
        cumem.wake_up()
    churn = [[object() for _ in range(1000)] for _ in range(100)]
    del churn
    gc.collect()
    assert abs(sys.getrefcount(None) - before) < 200
    assert holds_pattern(tensor, 1)


def test_memory_returns_to_the_driver_when_tensors_and_their_pool_go(
    driver: DriverUnderTest,
) -> None:
    """F3, pytorch#145168."""
    before = driver.free_bytes()
    with cumem.use_memory_pool("weights"):
        tensors = [make(size) for size in (100, 3 * MIB, 12 * MIB)]
    del tensors
    cumem.trim()
    assert driver.free_bytes() == before


def test_a_scope_belongs_to_its_thread(driver: DriverUnderTest) -> None:
    """F6, pytorch#152861, pytorch#161193: other threads are not captured, nested tags are kept."""
    with cumem.use_memory_pool("weights"):
        first = make(10)
        with cumem.use_memory_pool("kv_cache"):
            second = make(10)
            other = in_thread(lambda: torch.ones(10, device=driver.device))
        third = make(10)
    tags = [cumem.tag_of(tensor) for tensor in (first, second, other, third)]
    assert tags == ["weights", "kv_cache", None, "weights"]


@pytest.mark.machine(capacity_bytes=64 * MIB)
@pytest.mark.needs("small device")
def test_a_pool_works_on_after_torchs_out_of_memory(driver: DriverUnderTest) -> None:
    """F9, pytorch#133280."""
    with cumem.use_memory_pool("weights"):
        with pytest.raises(torch.OutOfMemoryError):
            torch.empty(100 * MIB, dtype=torch.uint8, device=driver.device)
        tensor = make(100, 1)
    cumem.sleep()
    cumem.wake_up()
    assert holds_pattern(tensor, 1)


# G


@contextmanager
def machine_that_refuses(code: str, times: int) -> Iterator[_C.Allocator]:
    """An allocator on a machine that refuses its first allocations."""
    emulator = library()
    machine = emulator.create(64 * MIB, 1)
    before = emulator.select(machine)
    for nth in range(1, times + 1):
        emulator.fail(machine, b"cuMemCreate", nth, error_code(code))
    try:
        driver = _C.load_driver(_runtime.emulator_library())
        yield _C.Allocator(driver, _runtime.core_config(cumem.Options()))
    finally:
        emulator.select(before)


@pytest.mark.parametrize("times", [1, 2])
@pytest.mark.parametrize(
    "code",
    ["CUDA_ERROR_NOT_PERMITTED", "CUDA_ERROR_NOT_SUPPORTED", "CUDA_ERROR_INVALID_VALUE"],
)
def test_a_kind_of_handle_that_is_offered_and_refused_is_done_without(
    code: str, times: int
) -> None:
    """G5, vllm#33540, MoonEP#28: the attribute says yes, the first create says no."""
    with machine_that_refuses(code, times) as allocator:
        address = allocator.malloc(3 * MIB, 0, 0, _C.Owner("weights", "offload"))
        assert not allocator.device_info(0).gpu_direct_rdma
        assert allocator.device_info(0).posix_handle == (times == 1)
        allocator.verify()
        allocator.free(address)


def test_a_device_that_is_full_says_nothing_about_its_features() -> None:
    """G3, vllm#29569; G5: out of memory at the probe takes no feature away."""
    with machine_that_refuses("CUDA_ERROR_OUT_OF_MEMORY", 1) as allocator:
        assert allocator.device_info(0).posix_handle
        address = allocator.malloc(3 * MIB, 0, 0, _C.Owner("weights", "offload"))
        allocator.free(address)


@pytest.mark.needs("count of driver calls")
def test_an_allocation_registers_nothing_and_waits_for_nothing(driver: DriverUnderTest) -> None:
    """G6, sglang#36943: registration inside malloc deadlocked."""
    told: list[object] = []
    handle = cumem.on_after_map(told.append)
    calls = ("cuMemHostRegister", "cuCtxSynchronize", "cuStreamSynchronize")
    with cumem.use_memory_pool("weights"):
        first = make(100)
        before = [driver.emulator.calls(call) for call in calls]
        tensors = [make(size) for size in (3 * MIB, 12 * MIB, 40 * MIB)]
        assert [driver.emulator.calls(call) for call in calls] == before
    handle.remove()
    assert told == []
    del first, tensors


# I

# In place of the module, which torch imports by itself where it is installed.
RECORDS_NVML = """
import sys, types
asked = []
class Recorder(types.ModuleType):
    def __getattr__(self, name):
        if name.startswith('nvml'):
            asked.append(name)
        raise AttributeError(name)
sys.modules['pynvml'] = Recorder('pynvml')
"""


def test_no_sleep_and_no_wake_asks_nvml() -> None:
    """I3, vllm-project/ci-infra#355: NVML fails on a slice of a GPU."""
    run_fresh(
        RECORDS_NVML + CYCLE + "assert asked == [], asked\n"
        "assert 'libnvidia-ml' not in open('/proc/self/maps').read()\n"
    )


@pytest.mark.needs("refusal to pin")
def test_every_cycle_works_with_memory_that_cannot_be_pinned(driver: DriverUnderTest) -> None:
    """I2, vllm#312, vllm#41496, vllm#53888: pageable host memory, the slow and honest way."""
    driver.emulator.refuse_pinning()
    with cumem.use_memory_pool("weights"):
        tensor = make(9 * MIB + 5)
    for seed in range(3):
        fill_pattern(tensor, seed)
        report = cumem.sleep()
        assert report.pageable_bytes == report.host_bytes > 0
        cumem.wake_up()
        assert holds_pattern(tensor, seed)


# J


def test_a_second_sleep_of_what_has_not_changed_copies_nothing() -> None:
    """J1, TMS#86: and what has changed is copied, by pieces."""
    with cumem.use_memory_pool("weights"):
        tensor = make(12 * MIB, 1)
    first = cumem.sleep()
    cumem.wake_up()
    second = cumem.sleep()
    cumem.wake_up()
    assert first.copied_bytes == first.offloaded_bytes
    assert (second.copied_bytes, second.skipped_bytes) == (0, second.offloaded_bytes)
    tensor[5 * MIB] += 1
    third = cumem.sleep()
    cumem.wake_up()
    assert 0 < third.copied_bytes <= 2 * GRANULE
    assert host_difference(tensor) == [5 * MIB]


def host_difference(tensor: torch.Tensor) -> list[int]:
    """Where ``tensor`` differs from the pattern it was made with."""
    expected = make(tensor.numel(), 1)
    return (tensor != expected).nonzero().view(-1).tolist()


def test_a_report_says_where_the_time_went() -> None:
    """J2, vllm#48337: pinning, copies and the driver apart."""
    with cumem.use_memory_pool("weights"):
        tensor = make(12 * MIB)
    slept = cumem.sleep()
    woke = cumem.wake_up()
    assert {"pin", "copy", "release"} <= slept.phases.keys()
    assert "copy" in woke.phases
    assert all(seconds >= 0 for report in (slept, woke) for seconds in report.phases.values())
    del tensor


# K and L


def test_nothing_listens_unless_it_is_asked_for() -> None:
    """K1, vllm#22310; K2, dynamo#12011: no port, no socket, no route."""
    run_fresh(
        CYCLE + "links = [os.readlink(f'/proc/self/fd/{fd}') for fd in before_and_after()]\n"
        "assert not [link for link in links if link.startswith('socket:')], links\n"
    )


def test_a_sleep_says_what_it_did_of_what_was_asked() -> None:
    """L2, production-stack#953: tags and levels that were dropped on the way would show."""
    tensors = []
    for tag in ("weights", "kv_cache"):
        with cumem.use_memory_pool(tag):
            tensors.append(make(100))
    assert cumem.sleep(tags=["kv_cache"]).tags == {"kv_cache"}
    rest = cumem.sleep(level=2)
    assert (rest.tags, rest.offloaded_bytes, rest.discarded_bytes) == ({"weights"}, 0, 512)
    cumem.wake_up()
    del tensors


def test_a_pool_that_is_kept_is_an_allocator_without_sleep(driver: DriverUnderTest) -> None:
    """L3, vllm#33648."""
    with cumem.use_memory_pool("buffers", on_sleep="keep"):
        tensor = make(3 * MIB, 1)
    used = driver.used_bytes()
    for level in (1, 2):
        assert cumem.sleep(level).freed_bytes == 0
    assert driver.used_bytes() == used
    assert holds_pattern(tensor, 1)
