"""What is left when the driver refuses a call?"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
import torch
from support import GRANULE, MIB, DriverUnderTest, holds_pattern, make, state, tag_stats

import cumem
from cumem import _C, _runtime
from cumem._emulator import library
from cumem.errors import translated

pytestmark = pytest.mark.needs("failures on request")

UNKNOWN = "CUDA_ERROR_UNKNOWN"

# One unmap a segment, and one release a chunk.
REFUSALS = [("cuMemUnmap", 1), ("cuMemUnmap", 2), *(("cuMemRelease", nth) for nth in range(1, 5))]


@pytest.fixture
def tensors() -> Iterator[list[torch.Tensor]]:
    """Two segments of two chunks each."""
    cumem.configure(cumem.Options(chunk_bytes=10 * MIB))
    with cumem.use_memory_pool("weights"):
        made = [make(20 * MIB, 0), make(20 * MIB, 1)]
    yield made
    made.clear()


def intact(tensors: list[torch.Tensor]) -> bool:
    return all(holds_pattern(tensor, seed) for seed, tensor in enumerate(tensors))


@pytest.mark.parametrize(
    "call",
    [
        *("cuCtxSynchronize", "cuMemHostRegister", "cuStreamCreate"),
        *("cuMemcpyDtoHAsync", "cuEventSynchronize"),
    ],
)
def test_a_sleep_that_fails_before_the_first_unmap_changes_nothing(
    driver: DriverUnderTest, tensors: list[torch.Tensor], call: str
) -> None:
    cumem.configure(cumem.Options(allow_pageable=False))
    before = state()
    driver.emulator.fail(call, code=UNKNOWN)
    with pytest.raises(cumem.DriverError, match=call) as caught:
        cumem.sleep()
    assert UNKNOWN in str(caught.value)
    assert state() == before
    cumem.check()
    assert intact(tensors)
    cumem.sleep()
    cumem.wake_up()
    assert intact(tensors)


@pytest.mark.parametrize(("call", "nth"), REFUSALS)
def test_a_sleep_that_is_refused_half_way_continues(
    driver: DriverUnderTest, tensors: list[torch.Tensor], call: str, nth: int
) -> None:
    driver.emulator.fail(call, nth=nth, code=UNKNOWN)
    with pytest.raises(cumem.DriverError, match=call):
        cumem.sleep()
    cumem.check()
    for seed, tensor in enumerate(tensors):
        assert not cumem.is_mapped(tensor) or holds_pattern(tensor, seed)
    cumem.sleep()
    cumem.check()
    assert driver.used_bytes() == 0
    assert tag_stats("weights").asleep_bytes == 40 * MIB
    cumem.wake_up()
    assert intact(tensors)


@pytest.mark.parametrize(("call", "nth"), REFUSALS)
def test_a_sleep_that_is_refused_half_way_can_be_taken_back(
    driver: DriverUnderTest, tensors: list[torch.Tensor], call: str, nth: int
) -> None:
    driver.emulator.fail(call, nth=nth, code=UNKNOWN)
    with pytest.raises(cumem.DriverError):
        cumem.sleep()
    cumem.wake_up()
    cumem.check()
    assert intact(tensors)
    assert driver.used_bytes() == 40 * MIB


@pytest.mark.parametrize("nth", [1, 2])
@pytest.mark.parametrize(
    "call",
    [
        *("cuMemCreate", "cuMemMap", "cuMemSetAccess"),
        *("cuMemcpyHtoDAsync", "cuStreamCreate", "cuEventSynchronize"),
    ],
)
def test_a_wake_that_fails_leaves_everything_asleep(
    driver: DriverUnderTest, tensors: list[torch.Tensor], call: str, nth: int
) -> None:
    if nth > 1 and call in ("cuStreamCreate", "cuEventSynchronize"):
        pytest.skip("a wake makes this call once")
    cumem.sleep()
    before = state()
    driver.emulator.fail(call, nth=nth, code=UNKNOWN)
    with pytest.raises(cumem.DriverError, match=call):
        cumem.wake_up()
    assert state() == before
    assert driver.used_bytes() == 0
    cumem.check()
    cumem.wake_up()
    assert intact(tensors)


def test_a_wake_that_fails_between_copies_waits_for_those_under_way(
    driver: DriverUnderTest,
) -> None:
    with cumem.use_memory_pool("weights"):
        tensors = [make(10 * MIB, seed) for seed in range(3)]
    cumem.sleep()
    driver.emulator.set_bandwidth(200 * MIB)
    driver.emulator.fail("cuMemcpyHtoDAsync", nth=3, code=UNKNOWN)
    with pytest.raises(cumem.DriverError):
        cumem.wake_up()
    ledger = driver.emulator.ledger()
    assert (ledger["pending_work"], ledger["dead_contexts"]) == (0, 0)
    driver.emulator.set_bandwidth(0)
    cumem.wake_up()
    assert intact(tensors)


def test_a_sleep_that_fails_between_copies_waits_for_those_under_way(
    driver: DriverUnderTest,
) -> None:
    with cumem.use_memory_pool("weights"):
        tensors = [make(10 * MIB, seed) for seed in range(3)]
    driver.emulator.set_bandwidth(200 * MIB)
    driver.emulator.fail("cuMemcpyDtoHAsync", nth=3, code=UNKNOWN)
    with pytest.raises(cumem.DriverError):
        cumem.sleep()
    assert driver.emulator.ledger()["pending_work"] == 0
    driver.emulator.set_bandwidth(0)
    cumem.sleep()
    cumem.wake_up()
    assert intact(tensors)


@pytest.mark.parametrize("nth", [1, 2])
@pytest.mark.parametrize(
    "call", ["cuMemAddressReserve", "cuMemCreate", "cuMemMap", "cuMemSetAccess"]
)
def test_an_allocation_that_fails_leaves_nothing(
    driver: DriverUnderTest, call: str, nth: int
) -> None:
    if nth > 1 and call in ("cuMemAddressReserve", "cuMemSetAccess"):
        pytest.skip("an allocation makes this call once")
    cumem.configure(cumem.Options(chunk_bytes=GRANULE, warn_empty_scope=False))
    with cumem.use_memory_pool("weights"):
        # Torch's pool would ask again; a scope is open, so it does not.
        driver.emulator.fail(call, nth=nth)
        with pytest.raises(torch.OutOfMemoryError):
            torch.empty(20 * MIB, dtype=torch.uint8, device=driver.device)
        assert driver.used_bytes() == 0
        assert cumem.stats().reserved_addresses == 0
        cumem.check()
        tensor = make(20 * MIB)
    assert holds_pattern(tensor)


def test_an_out_of_memory_that_passes_is_tried_again(
    driver: DriverUnderTest, tensors: list[torch.Tensor]
) -> None:
    cumem.sleep()
    driver.emulator.fail("cuMemCreate")
    cumem.wake_up()
    assert intact(tensors)


def test_a_dead_context_says_that_the_process_must_restart(driver: DriverUnderTest) -> None:
    driver.tolerates_refusals = True
    with cumem.use_memory_pool("weights"):
        tensor = make(1000)
    driver.emulator.poison()
    for call in (cumem.sleep, lambda: cumem.sleep(level=2), cumem.check):
        with pytest.raises(cumem.DriverError, match="restart the process"):
            call()
    driver.emulator.poison(code="CUDA_SUCCESS")  # so that the fixture can clean up
    del tensor


def test_a_free_that_the_driver_refuses_is_told_once(driver: DriverUnderTest) -> None:
    driver.tolerates_refusals = True
    with cumem.use_memory_pool("weights"):
        tensor = make(1000)
    del tensor
    driver.emulator.fail("cuMemUnmap", code=UNKNOWN)
    cumem.trim()
    with pytest.warns(RuntimeWarning, match="could not be given back"):
        cumem.default_device()
    cumem.default_device()
    stats = cumem.stats()
    assert (stats.quarantined_segments, stats.quarantined_bytes) == (1, GRANULE)
    cumem.check()
    with cumem.use_memory_pool("weights"):
        again = make(1000, 1)
    assert holds_pattern(again, 1)


@pytest.mark.parametrize("call", [cumem.trim, cumem.sleep, cumem.wake_up])
def test_memory_that_the_driver_kept_goes_back_with_the_next_call(
    driver: DriverUnderTest, call: Callable[[], object]
) -> None:
    with cumem.use_memory_pool("weights"):
        tensor, dead = make(1000, 1), make(30 * MIB)
    del dead
    driver.emulator.fail("cuMemUnmap", code=UNKNOWN)
    assert cumem.trim() == 0
    assert driver.used_bytes() == GRANULE + 30 * MIB
    with pytest.warns(RuntimeWarning, match="1 segment.s. could not be given back"):
        cumem.default_device()
    stats = cumem.stats()
    assert (stats.segment_bytes, stats.quarantined_bytes) == (GRANULE, 30 * MIB)
    call()
    stats = cumem.stats()
    assert (stats.quarantined_segments, stats.quarantined_bytes) == (0, 0)
    assert stats.physical_bytes == driver.used_bytes() == stats.mapped_bytes
    assert stats.reserved_addresses == GRANULE
    cumem.check()
    cumem.wake_up()
    assert holds_pattern(tensor, 1)


def test_a_trim_counts_what_the_driver_takes_at_last(driver: DriverUnderTest) -> None:
    with cumem.use_memory_pool("weights"):
        tensor = make(30 * MIB)
    del tensor
    driver.emulator.fail("cuMemRelease", code=UNKNOWN)
    assert cumem.trim() == 0
    assert cumem.trim() == 30 * MIB
    assert (cumem.trim(), driver.used_bytes()) == (0, 0)
    with pytest.warns(RuntimeWarning, match=r"0 \(0 bytes\) are kept aside"):
        cumem.default_device()


POSIX_HANDLES, RDMA, VIRTUAL_MEMORY = 103, 110, 102  # of CUdevice_attribute


@contextmanager
def machine_without(attribute: int) -> Iterator[_C.Allocator]:
    """An allocator on a machine whose driver has never heard of ``attribute``."""
    emulator = library()
    machine = emulator.create(64 * MIB, 1)
    emulator.set_attribute(machine, attribute, -1)
    before = emulator.select(machine)
    try:
        driver = _C.load_driver(_runtime.emulator_library())
        yield _C.Allocator(driver, _runtime.core_config(cumem.Options()))
    finally:
        emulator.select(before)


@pytest.mark.parametrize("attribute", [POSIX_HANDLES, RDMA])
def test_an_attribute_the_driver_does_not_know_is_a_feature_that_is_absent(attribute: int) -> None:
    with machine_without(attribute) as allocator:
        address = allocator.malloc(3 * MIB, 0, 0, _C.Owner("weights", "offload"))
        features = allocator.device_info(0)
        assert features.posix_handle == (attribute != POSIX_HANDLES)
        assert features.gpu_direct_rdma == (attribute != RDMA)
        assert allocator.is_awake(address, 3 * MIB)
        allocator.verify()
        allocator.free(address)


def test_a_device_without_virtual_memory_is_said_to_be_one() -> None:
    with machine_without(VIRTUAL_MEMORY) as allocator:
        with (
            pytest.raises(cumem.DriverError, match="virtual memory management"),
            translated("device 0", "Nothing was changed."),
        ):
            allocator.device_info(0)
        assert allocator.live_segments() == 0
