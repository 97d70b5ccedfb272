"""What happens when the host has no room?"""

from __future__ import annotations

import pytest
from support import MIB, DriverUnderTest, holds_pattern, make, state, tag_stats

import cumem


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
