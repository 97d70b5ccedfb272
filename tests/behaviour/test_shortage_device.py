"""What happens when the device has no room?"""

from __future__ import annotations

import pytest
import torch
from support import GRANULE, MIB, DriverUnderTest, fill_pattern, holds_pattern, make, state

import cumem


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
