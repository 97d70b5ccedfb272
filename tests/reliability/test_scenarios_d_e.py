"""Public reports D and E: memory that does not come back, counters, fragmentation."""

from __future__ import annotations

from contextlib import ExitStack

import pytest
import torch
from support import GRANULE, MIB, DriverUnderTest, holds_pattern, make, tag_stats

import cumem


def test_every_way_of_entering_a_scope_captures(driver: DriverUnderTest) -> None:
    """D2, vllm#32714, vllm#37111: two managers in one statement, a stack, a decorator."""
    made = []
    with cumem.use_memory_pool("weights") as pool, torch.device(driver.device):
        made.append(torch.ones(1000))
    with ExitStack() as stack:
        stack.enter_context(torch.device(driver.device))
        stack.enter_context(cumem.use_memory_pool("weights"))
        made.append(torch.ones(1000))

    @cumem.use_memory_pool("weights")
    def build() -> torch.Tensor:
        return torch.ones(1000, device=driver.device)

    made.append(build())
    assert {cumem.tag_of(tensor) for tensor in made} == {"weights"}
    assert pool.captured_bytes >= 4000


@pytest.mark.needs("second tenant on a device of choice")
def test_memory_of_others_is_told_apart_from_ours(driver: DriverUnderTest) -> None:
    """D4, NeMo-RL#223, verl#6266; D13, vllm#55169: what stays while we sleep is not ours."""
    with cumem.use_memory_pool("weights"):
        tensor = make(30 * MIB, 1)
    with driver.another_tenant(leaves=64 * MIB):
        (awake,) = cumem.stats().devices
        cumem.sleep()
        (asleep,) = cumem.stats().devices
        assert (awake.mapped_bytes, asleep.mapped_bytes) == (30 * MIB, 0)
        others = asleep.used_bytes - asleep.mapped_bytes
        assert others == awake.used_bytes - awake.mapped_bytes > 0
        assert "0 B mapped by cumem" in str(cumem.stats())
    cumem.wake_up()
    assert holds_pattern(tensor, 1)


def test_counters_of_torch_are_left_alone_and_ours_say_where_memory_is() -> None:
    """D10, vllm#17117, vllm#33625, verl#1101: reserved stays what torch believes it has."""
    with cumem.use_memory_pool("weights"):
        tensor = make(30 * MIB)
    (before,) = cumem.stats().devices
    cumem.sleep()
    stats = cumem.stats()
    (device,) = stats.devices
    assert device.reserved_bytes == before.reserved_bytes >= stats.segment_bytes
    assert (stats.mapped_bytes, stats.asleep_bytes) == (0, 30 * MIB)
    assert stats.reserved_addresses == 30 * MIB
    cumem.wake_up()
    del tensor


def test_cycles_lose_no_granule_and_no_handle(driver: DriverUnderTest) -> None:
    """D5, vllm#21336."""
    with cumem.use_memory_pool("weights"):
        tensors = [make(size, size) for size in (700, 3 * MIB, 12 * MIB)]
    with cumem.use_memory_pool("kv_cache"):
        kv = make(12 * MIB)
    free = driver.free_bytes()
    for _ in range(50):
        cumem.sleep()
        stats = cumem.stats()
        assert stats.handles_created == stats.handles_released
        cumem.wake_up()
        assert driver.free_bytes() == free
    assert all(holds_pattern(tensor, tensor.numel()) for tensor in tensors)
    del kv


def test_host_memory_goes_with_the_tensors_that_die_asleep() -> None:
    """D6, TMS#90, TMS#89, TMS#45."""
    with cumem.use_memory_pool("weights"):
        tensors = [make(12 * MIB) for _ in range(3)]
    cumem.sleep()
    assert cumem.stats().host_used_bytes >= 36 * MIB
    del tensors
    cumem.trim()
    assert cumem.stats().host_used_bytes == 0
    cumem.release_host_memory()
    assert cumem.stats().host_bytes == 0


@pytest.mark.parametrize("size", [GRANULE + 1, 9 * MIB, 17 * MIB + 3, 33 * MIB])
def test_host_memory_is_not_rounded_up_to_a_power_of_two(size: int) -> None:
    """D7, vllm#56410, LMCache#1147, pytorch#150517."""
    with cumem.use_memory_pool("weights"):
        tensor = make(size, 1)
    report = cumem.sleep()
    assert report.offloaded_bytes <= report.host_bytes < 1.05 * report.offloaded_bytes
    assert report.offloaded_bytes - size <= MIB  # which torch does not split off
    cumem.wake_up()
    assert holds_pattern(tensor, 1)


def test_host_memory_of_one_tag_is_back_before_another_tag_wakes() -> None:
    """D8, vllm#50011, vllm#57629: where host and device share memory, tags wake one by one."""
    cumem.configure(cumem.Options(retain_backup=False))
    with cumem.use_memory_pool("weights"):
        weights = make(12 * MIB, 1)
    with cumem.use_memory_pool("kv_cache"):
        kv = make(12 * MIB)
    cumem.sleep(offload_tags=["weights"])
    cumem.wake_up(["weights"])
    stats = cumem.stats()
    assert (stats.host_bytes, stats.mapped_bytes) == (0, 12 * MIB)
    cumem.wake_up(["kv_cache"])
    assert holds_pattern(weights, 1)
    del kv


# E


@pytest.mark.machine(capacity_bytes=64 * MIB)
@pytest.mark.needs("small device")
def test_memory_of_a_dead_tensor_serves_a_larger_one_after_the_scope(
    driver: DriverUnderTest,
) -> None:
    """E1, pytorch#159674, pytorch#175015: inside a scope torch gives nothing back."""
    cumem.configure(cumem.Options(warn_empty_scope=False))
    with cumem.use_memory_pool("weights"):
        tensor = make(38 * MIB)
        del tensor
        with pytest.raises(torch.OutOfMemoryError):
            make(44 * MIB)
    cumem.trim()
    with cumem.use_memory_pool("weights"):
        tensor = make(44 * MIB, 1)
    assert holds_pattern(tensor, 1)


@pytest.mark.parametrize("grown", [13 * MIB, 6 * MIB], ids=["larger", "smaller"])
def test_replaced_weights_leave_no_second_copy_behind(driver: DriverUnderTest, grown: int) -> None:
    """E2, vllm#34877, vllm#49151; E3, vllm#19855: conversion while the scope is open."""
    with cumem.use_memory_pool("weights"):
        weights = [make(12 * MIB, seed) for seed in range(4)]
        for at in range(4):
            weights[at] = make(grown, 50 + at)
    cumem.trim()
    stats = tag_stats("weights")
    assert stats.mapped_bytes <= 1.15 * stats.live_bytes + 40 * MIB * (grown < 10 * MIB)
    report = cumem.sleep()
    assert report.offloaded_bytes == stats.live_bytes
    assert cumem.wake_up().mapped_bytes == stats.segment_bytes
    assert all(holds_pattern(weights[at], 50 + at) for at in range(4))


def test_dead_blocks_cost_no_host_memory() -> None:
    """E4: a segment of 20 MiB of which two live, and all of it goes back."""
    with cumem.use_memory_pool("weights"):
        dead, live = make(9 * MIB), make(2 * MIB, 1)
        assert dead.data_ptr() // (20 * MIB) != 0
        del dead
    report = cumem.sleep()
    assert report.freed_bytes == 20 * MIB
    assert report.offloaded_bytes < 3 * MIB
    assert report.host_bytes < 3 * MIB
    cumem.wake_up()
    assert holds_pattern(live, 1)


def test_exactly_the_rounded_size_is_reserved() -> None:
    """E6, pytorch#186213, nccl#2331."""
    with cumem.use_memory_pool("weights"):
        tensor = make(33 * MIB)
    assert cumem.stats().reserved_addresses == 34 * MIB
    del tensor
    cumem.trim()
    assert cumem.stats().reserved_addresses == 0
