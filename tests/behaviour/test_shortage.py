"""What happens when the host or the device has no room?"""

from __future__ import annotations

import pytest
import torch
from support import (
    GRANULE,
    MIB,
    DriverUnderTest,
    fill_pattern,
    holds_pattern,
    make,
    state,
    tag_stats,
)

import cumem

# The host


def test_a_sleep_over_the_host_limit_changes_nothing_and_works_once_it_is_raised() -> None:
    cumem.configure(cumem.Options(host_limit_bytes=4 * MIB))
    with cumem.use_memory_pool("weights"):
        tensors = [make(3 * MIB, seed) for seed in range(2)]
    before = state()
    with pytest.raises(cumem.HostOutOfMemoryError) as caught:
        cumem.sleep()
    assert isinstance(caught.value, (MemoryError, cumem.CumemError))
    assert "6.0 MiB" in str(caught.value)
    assert "4.0 MiB free" in str(caught.value)
    assert state() == before
    assert cumem.stats().host_bytes == 0
    assert all(holds_pattern(tensor, seed) for seed, tensor in enumerate(tensors))
    cumem.configure(cumem.Options(host_limit_bytes=8 * MIB))
    cumem.sleep()
    cumem.wake_up()
    assert all(holds_pattern(tensor, seed) for seed, tensor in enumerate(tensors))


def test_a_host_limit_that_is_just_enough_is_enough() -> None:
    with cumem.use_memory_pool("weights"):
        tensors = [make(size, size) for size in (100, 5000, 3 * MIB + 1)]
    cumem.configure(
        cumem.Options(host_limit_bytes=-(-tag_stats("weights").live_bytes // 4096) * 4096)
    )
    cumem.sleep()
    cumem.wake_up()
    assert all(holds_pattern(tensor, tensor.numel()) for tensor in tensors)


def test_the_host_limit_is_for_all_tags_together() -> None:
    cumem.configure(cumem.Options(host_limit_bytes=4 * MIB))
    tensors = {}
    for tag in ("weights", "draft"):
        with cumem.use_memory_pool(tag):
            tensors[tag] = make(3 * MIB)
    cumem.sleep(tags=["weights"])
    before = state()
    with pytest.raises(cumem.HostOutOfMemoryError):
        cumem.sleep(tags=["draft"])
    assert state() == before
    assert cumem.sleeping_tags() == {"weights"}
    cumem.sleep(tags=["draft"], level=2)
    cumem.wake_up()
    assert holds_pattern(tensors["weights"])


def test_a_discarding_sleep_needs_no_host_memory() -> None:
    cumem.configure(cumem.Options(host_limit_bytes=1))
    with cumem.use_memory_pool("kv_cache"):
        tensor = make(3 * MIB)
    assert cumem.sleep().host_bytes == 0
    cumem.wake_up()
    del tensor


def test_host_memory_is_kept_for_the_next_sleep_and_given_back_on_request() -> None:
    with cumem.use_memory_pool("weights"):
        tensor = make(5 * MIB)
    cumem.sleep()
    held = cumem.stats().host_bytes
    assert 5 * MIB <= held < 6 * MIB
    cumem.wake_up()
    stats = cumem.stats()
    assert (stats.host_bytes, stats.host_used_bytes) == (held, held)
    cumem.sleep()
    assert cumem.stats().host_bytes == held
    cumem.wake_up()
    assert cumem.release_host_memory() == held
    stats = cumem.stats()
    assert (stats.host_bytes, stats.refused_calls) == (0, 0)
    assert cumem.release_host_memory() == 0
    assert holds_pattern(tensor)


def test_host_memory_in_backups_is_never_given_back() -> None:
    with cumem.use_memory_pool("weights"):
        tensor = make(5 * MIB)
    cumem.sleep()
    assert cumem.release_host_memory() == 0
    cumem.wake_up()
    assert holds_pattern(tensor)


def test_host_memory_goes_back_at_wake_when_it_is_not_retained() -> None:
    cumem.configure(cumem.Options(retain_backup=False))
    with cumem.use_memory_pool("weights"):
        tensor = make(5 * MIB)
    for _ in range(2):
        cumem.sleep()
        assert cumem.stats().host_bytes >= 5 * MIB
        cumem.wake_up()
        stats = cumem.stats()
        assert (stats.host_bytes, stats.refused_calls) == (0, 0)
    assert holds_pattern(tensor)


def test_host_memory_stays_near_the_backup_and_does_not_grow_with_cycles() -> None:
    with cumem.use_memory_pool("weights"):
        tensor = make(9 * MIB + 12345)
    for _ in range(5):
        report = cumem.sleep()
        assert report.host_bytes <= 1.05 * report.offloaded_bytes
        cumem.wake_up()
    del tensor


@pytest.mark.needs("refusal to pin")
def test_memory_that_cannot_be_pinned_is_used_unpinned_and_the_report_says_so(
    driver: DriverUnderTest,
) -> None:
    driver.emulator.refuse_pinning()
    with cumem.use_memory_pool("weights"):
        tensor = make(3 * MIB)
    report = cumem.sleep()
    assert report.pageable_bytes == cumem.stats().pageable_bytes == report.host_bytes
    assert "pageable" in str(report)
    cumem.wake_up()
    assert holds_pattern(tensor)


@pytest.mark.needs("refusal to pin")
@pytest.mark.parametrize("refuse", ["all", "more than 1 MiB"])
def test_a_sleep_that_may_not_use_unpinned_memory_is_refused(
    driver: DriverUnderTest, refuse: str
) -> None:
    cumem.configure(cumem.Options(allow_pageable=False))
    with cumem.use_memory_pool("weights"):
        tensor = make(3 * MIB)
    before = state()
    if refuse == "all":
        driver.emulator.refuse_pinning()
    else:
        driver.emulator.set_host_limit(MIB)
    with pytest.raises(cumem.CumemError, match="cuMemHostRegister") as caught:
        cumem.sleep()
    assert isinstance(caught.value, cumem.HostOutOfMemoryError) or refuse == "all"
    assert state() == before
    driver.emulator.refuse_pinning(False)
    driver.emulator.set_host_limit(None)
    cumem.sleep()
    cumem.wake_up()
    assert holds_pattern(tensor)


# The device


def test_a_wake_without_room_leaves_everything_asleep_and_can_be_repeated(
    driver: DriverUnderTest,
) -> None:
    tensors = {}
    for seed, tag in enumerate(("weights", "draft")):
        with cumem.use_memory_pool(tag):
            tensors[tag] = make(20 * MIB, seed)
    cumem.sleep()
    before = state()
    with driver.another_tenant(leaves=30 * MIB):
        used = driver.used_bytes()
        with pytest.raises(cumem.DeviceOutOfMemoryError) as caught:
            cumem.wake_up()
        assert (state(), driver.used_bytes()) == (before, used)
        assert isinstance(caught.value, torch.OutOfMemoryError)
        for part in ("cuMemCreate", "20.0 MiB", "free", "backup", "call wake_up again"):
            assert part in str(caught.value)
        cumem.wake_up(["weights"])
        assert holds_pattern(tensors["weights"], 0)
        assert cumem.sleeping_tags() == {"draft"}
        with pytest.raises(torch.OutOfMemoryError, match="draft"):
            cumem.wake_up(["draft"])
    cumem.wake_up()
    assert all(holds_pattern(tensor, seed) for seed, tensor in enumerate(tensors.values()))


def test_a_wake_of_many_chunks_without_room_gives_all_of_them_back(
    driver: DriverUnderTest,
) -> None:
    cumem.configure(cumem.Options(chunk_bytes=GRANULE))
    with cumem.use_memory_pool("weights"):
        tensor = make(40 * MIB, 1)
    cumem.sleep()
    for _ in range(3):
        with driver.another_tenant(leaves=38 * MIB):
            used = driver.used_bytes()
            with pytest.raises(cumem.DeviceOutOfMemoryError):
                cumem.wake_up()
            assert driver.used_bytes() == used
            cumem.check()
    cumem.wake_up()
    assert holds_pattern(tensor, 1)


def test_an_awake_tag_is_untouched_by_a_wake_that_fails(driver: DriverUnderTest) -> None:
    with cumem.use_memory_pool("weights"):
        weights = make(20 * MIB, 1)
    with cumem.use_memory_pool("kv_cache"):
        kv = make(20 * MIB)
    cumem.sleep(tags=["kv_cache"])
    with driver.another_tenant(leaves=GRANULE), pytest.raises(cumem.DeviceOutOfMemoryError):
        cumem.wake_up()
    assert holds_pattern(weights, 1)
    cumem.wake_up()
    fill_pattern(kv, 2)
    assert holds_pattern(kv, 2)


def test_the_undefined_tags_are_told_by_the_wake_that_works(driver: DriverUnderTest) -> None:
    with cumem.use_memory_pool("kv_cache"):
        kv = make(20 * MIB)
    cumem.sleep()
    epoch = cumem.epoch("kv_cache")
    with driver.another_tenant(leaves=GRANULE), pytest.raises(cumem.DeviceOutOfMemoryError):
        cumem.wake_up()
    assert cumem.wake_up().undefined == {"kv_cache"}
    assert cumem.epoch("kv_cache") == epoch
    del kv


def test_an_allocation_without_room_is_torchs_error_and_leaves_nothing(
    driver: DriverUnderTest,
) -> None:
    with cumem.use_memory_pool("weights"):
        small = make(100, 1)
        reserved = cumem.stats().reserved_addresses
        failed = cumem.stats().failed_mallocs
        with driver.another_tenant(leaves=30 * MIB):
            with pytest.raises(torch.OutOfMemoryError):
                torch.empty(40 * MIB, dtype=torch.uint8, device=driver.device)
            medium = make(20 * MIB, 2)
        assert cumem.stats().failed_mallocs > failed
        assert cumem.stats().reserved_addresses - reserved == 20 * MIB
        large = make(40 * MIB, 3)
    cumem.sleep()
    cumem.wake_up()
    assert all(
        holds_pattern(tensor, seed) for tensor, seed in ((small, 1), (medium, 2), (large, 3))
    )


def test_sleep_makes_room_for_another_tenant(driver: DriverUnderTest) -> None:
    before = driver.free_bytes()
    with cumem.use_memory_pool("weights"):
        tensor = make(100 * MIB, 1)
    cumem.sleep()
    assert driver.free_bytes() == before
    with driver.another_tenant(leaves=GRANULE):
        assert driver.free_bytes() <= 2 * GRANULE
    cumem.wake_up()
    assert holds_pattern(tensor, 1)


def test_memory_of_a_sleeping_tag_serves_another(driver: DriverUnderTest) -> None:
    with driver.another_tenant(leaves=64 * MIB):
        with cumem.use_memory_pool("first"):
            first = make(40 * MIB, 1)
        cumem.sleep()
        with cumem.use_memory_pool("second"):
            second = make(40 * MIB, 2)
        with pytest.raises(cumem.DeviceOutOfMemoryError):
            cumem.wake_up(["first"])
        cumem.sleep(tags=["second"])
        cumem.wake_up(["first"])
        assert holds_pattern(first, 1)
    cumem.wake_up()
    assert holds_pattern(second, 2)


def test_a_scope_entered_when_memory_is_short_clears_what_is_only_cached(
    driver: DriverUnderTest,
) -> None:
    with cumem.use_memory_pool("draft"):
        cached = make(30 * MIB)
        live = make(100)
    cumem.trim("draft")
    with driver.another_tenant(leaves=10 * MIB):
        del cached
        with cumem.use_memory_pool("weights"):
            tensor = make(30 * MIB, 1)
    assert holds_pattern(tensor, 1)
    del live
