"""Public reports A and B: double calls, partial tags, failures half-way, work under way."""

from __future__ import annotations

import ctypes
import gc

import pytest
import torch
from support import (
    GRANULE,
    MIB,
    DriverUnderTest,
    fill_pattern,
    holds_pattern,
    make,
    run_fresh,
    state,
    tag_stats,
)

import cumem
from cumem import _C


def plugin() -> ctypes.CDLL:
    """The two functions that torch calls."""
    library = ctypes.CDLL(_C.__file__)
    library.cumem_malloc.restype = ctypes.c_void_p
    library.cumem_malloc.argtypes = (ctypes.c_ssize_t, ctypes.c_int, ctypes.c_void_p)
    library.cumem_free.restype = None
    library.cumem_free.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_void_p)
    return library


def test_the_pool_works_on_after_repeated_calls(driver: DriverUnderTest) -> None:
    """A1, vllm#36651: after a double sleep and a double wake allocation, free and sleep work."""
    with cumem.use_memory_pool("weights"):
        tensor = make(9 * MIB, 1)
    for call in (cumem.sleep, cumem.wake_up):
        call()
        before = (driver.used_bytes(), cumem.stats().handles_created)
        call()
        assert (driver.used_bytes(), cumem.stats().handles_created) == before
    with cumem.use_memory_pool("weights"):
        later = make(9 * MIB, 2)
    cumem.sleep()
    cumem.wake_up()
    assert holds_pattern(tensor, 1)
    assert holds_pattern(later, 2)


@pytest.mark.needs("plugin call without a tensor")
@pytest.mark.parametrize("asleep", [False, True])
@pytest.mark.parametrize("size", [0, 1, 3 * GRANULE, 1 << 60])
def test_a_free_goes_by_what_was_recorded_and_not_by_what_the_caller_says(
    driver: DriverUnderTest, asleep: bool, size: int
) -> None:
    """A1, vllm#36651; F15, rmm#1405: the size and the device of a free are not believed."""
    library = plugin()
    address = library.cumem_malloc(5 * MIB, 0, None)
    if asleep:
        _C.current().sleep(
            [_C.SegmentPlan(address, [], [], _C.Store.host)], _C.CleanCheck.never, False
        )
    library.cumem_free(address, size, 7, None)
    stats = cumem.stats()
    assert (driver.used_bytes(), stats.reserved_addresses, stats.unknown_frees) == (0, 0, 0)
    assert stats.handles_created == stats.handles_released


def test_three_sleeps_in_a_row_and_work_outside_harm_nothing(driver: DriverUnderTest) -> None:
    """A2, slime#1895, TMS#23: the process lives through a second sleep and what follows."""
    with cumem.use_memory_pool("weights"):
        tensor = make(3 * MIB, 1)
    for _ in range(3):
        cumem.sleep()
    outside = torch.ones(8 * MIB, dtype=torch.uint8, device=driver.device)
    assert outside.sum().item() == 8 * MIB
    del outside
    gc.collect()
    cumem.wake_up()
    assert holds_pattern(tensor, 1)


def test_incomplete_tags_leave_an_exact_state() -> None:
    """A3, vllm-omni#4473: a wake of part, a duplicate of it, and then the rest."""
    with cumem.use_memory_pool("weights"):
        weights = make(3 * MIB, 1)
    with cumem.use_memory_pool("kv_cache"):
        kv = make(3 * MIB, 2)
    cumem.sleep(offload_tags=["weights"])
    cumem.wake_up(["weights"])
    assert cumem.sleeping_tags() == {"kv_cache"}
    before = state()
    assert cumem.wake_up(["weights"]).tags == frozenset()
    assert state() == before
    assert cumem.wake_up().tags == {"kv_cache"}
    assert holds_pattern(weights, 1)
    kv.zero_()


@pytest.mark.parametrize("order", [("weights", "kv_cache"), ("kv_cache", "weights")])
def test_new_weights_may_be_written_between_two_tagged_wakes(order: tuple[str, str]) -> None:
    """A4, vllm#31618; A5, dynamo#13823; A7, vllm#45619: either order, and nothing is swallowed."""
    tensors = {}
    for seed, tag in enumerate(("weights", "kv_cache")):
        with cumem.use_memory_pool(tag):
            tensors[tag] = make(3 * MIB, seed)
    cumem.sleep()
    for awake, tag in enumerate(order, start=1):
        cumem.wake_up([tag])
        assert cumem.sleeping_tags() == set(order[awake:])
        fill_pattern(tensors[tag], 50 + awake)
        before = state()
        cumem.wake_up(order[:awake])  # what is up already
        assert state() == before
    assert all(holds_pattern(tensors[tag], 51 + at) for at, tag in enumerate(order))


@pytest.mark.needs("plugin call without a tensor")
def test_hundreds_of_segments_that_die_asleep_leave_nothing(driver: DriverUnderTest) -> None:
    """A8, TMS#92: a free of sleeping memory returns addresses and host memory, and no more."""
    library, allocator = plugin(), _C.current()
    before = cumem.stats()
    for number in range(200):
        address = library.cumem_malloc(GRANULE, 0, None)
        backup = [(address, 1000 + number)] if number % 2 else []
        allocator.sleep(
            [_C.SegmentPlan(address, backup, [], _C.Store.host)], _C.CleanCheck.never, False
        )
        library.cumem_free(address, GRANULE, 0, None)
    after = cumem.stats()
    assert after.reserved_addresses == before.reserved_addresses
    assert (after.host_used_bytes, after.refused_calls) == (0, 0)
    assert after.host_bytes < MIB
    assert driver.used_bytes() == 0


def test_out_of_memory_at_a_wake_names_what_is_missing_and_where(driver: DriverUnderTest) -> None:
    """A9, vllm#34600; A10, TMS#87: device, bytes wanted, bytes free and tag are in the message."""
    with cumem.use_memory_pool("weights"):
        tensor = make(30 * MIB, 1)
    cumem.sleep()
    with (
        driver.another_tenant(leaves=4 * MIB),
        pytest.raises(cumem.DeviceOutOfMemoryError) as caught,
    ):
        cumem.wake_up()
    for part in ("30.0 MiB", "4.0 MiB free", f"{driver.device.type}:0", "weights"):
        assert part in str(caught.value), part
    cumem.wake_up()
    assert holds_pattern(tensor, 1)


def test_a_process_lives_on_after_out_of_memory_at_a_wake() -> None:
    """A10, TMS#87, TMS#4: an error of Python, and neither exit() nor an abort."""
    done = run_fresh(
        "import torch, cumem\n"
        "from cumem import _emulator, _runtime\n"
        "with cumem.use_memory_pool('weights'):\n"
        "    tensor = torch.arange(1000)\n"
        "cumem.sleep()\n"
        "_emulator.library().fail(0, b'cuMemCreate', 1, 2)\n"
        "_emulator.library().fail(0, b'cuMemCreate', 2, 2)\n"
        "try:\n"
        "    cumem.wake_up()\n"
        "except torch.OutOfMemoryError:\n"
        "    cumem.wake_up()\n"
        "    print('alive', tensor.sum().item())\n"
    )
    assert done.stdout == "alive 499500\n"


# B


@pytest.mark.needs("count of driver calls")
def test_a_sleep_waits_once_for_the_device_and_not_for_each_segment(
    driver: DriverUnderTest,
) -> None:
    """B4, dynamo#5759, dynamo#6362."""
    waits = []
    for segments in (1, 6):
        with cumem.use_memory_pool("weights", on_sleep="discard"):
            tensors = [make(12 * MIB) for _ in range(segments)]
        before = driver.emulator.calls("cuCtxSynchronize")
        cumem.sleep()
        waits.append(driver.emulator.calls("cuCtxSynchronize") - before)
        cumem.wake_up()
        del tensors
        cumem.trim()
    assert waits[0] == waits[1] == 1


@pytest.mark.machine(capacity_bytes=64 * MIB)
def test_every_byte_is_there_for_others_as_soon_as_a_sleep_returns(driver: DriverUnderTest) -> None:
    """B4, B5, miles#86, slime#579: twenty rounds without a retry."""
    with cumem.use_memory_pool("weights"):
        tensors = [make(size, size) for size in (700, 3 * MIB, 30 * MIB)]
    before = driver.free_bytes()
    for _ in range(20):
        report = cumem.sleep()
        assert driver.free_bytes() - before == report.freed_bytes
        with driver.another_tenant(leaves=0):
            assert driver.free_bytes() == 0
        cumem.wake_up()
    assert all(holds_pattern(tensor, tensor.numel()) for tensor in tensors)


@pytest.mark.needs("stream that cumem has never heard of")
def test_dropped_results_of_a_tight_loop_are_not_unmapped_under_their_kernels(
    driver: DriverUnderTest,
) -> None:
    """B1, vllm#43020: a kernel is still writing when its result is dropped."""
    stream = driver.emulator.new_stream()
    for number in range(20):
        with cumem.use_memory_pool("weights"):
            tensor = make(4096)
        late = bytes([number]) * 4096
        driver.emulator.enqueue(stream=stream, write=(tensor.data_ptr(), late), delay=0.002)
        del tensor
        cumem.trim()
    ledger = driver.emulator.ledger()
    assert (ledger["dead_contexts"], tag_stats("weights").segments) == (0, 0)


@pytest.mark.needs("stream that cumem has never heard of")
def test_contents_are_valid_on_any_stream_when_a_wake_returns(driver: DriverUnderTest) -> None:
    """B2, vllm#45520, vllm#28714."""
    with cumem.use_memory_pool("weights"):
        tensor = make(4096, 1)
    expected = bytes(tensor.tolist())
    driver.emulator.set_bandwidth(100 * MIB)
    for blocking in (True, False):
        cumem.sleep()
        cumem.wake_up()
        copy = bytearray(4096)
        stream = driver.emulator.new_stream(blocking=blocking)
        driver.emulator.enqueue(stream=stream, read=(tensor.data_ptr(), copy))
        cumem.sleep()  # waits for the read
        assert copy == expected
        cumem.wake_up()
