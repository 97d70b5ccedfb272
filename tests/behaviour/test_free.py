"""What becomes of memory whose tensors die, awake or asleep?"""

from __future__ import annotations

import gc
import threading

import pytest
import torch
from support import GRANULE, MIB, DriverUnderTest, holds_pattern, in_thread, make, tag_stats

import cumem


def test_trim_gives_wholly_free_segments_back(driver: DriverUnderTest) -> None:
    before = driver.used_bytes()
    with cumem.use_memory_pool("weights"):
        small, large = make(100), make(30 * MIB)
    del large
    assert driver.used_bytes() - before == 32 * MIB
    assert cumem.trim() == 30 * MIB
    assert driver.used_bytes() - before == GRANULE
    assert holds_pattern(small)
    del small
    assert cumem.trim() == GRANULE
    assert driver.used_bytes() == before
    assert cumem.trim() == 0


def test_trim_of_one_tag_leaves_the_others() -> None:
    tensors = []
    for tag in ("weights", "draft"):
        with cumem.use_memory_pool(tag):
            tensors.append(make(100))
    tensors.clear()
    assert cumem.trim("weights") == GRANULE
    assert tag_stats("draft").segment_bytes == GRANULE
    assert cumem.trim("draft") == GRANULE


def test_trim_leaves_the_pool_of_an_open_scope() -> None:
    with cumem.use_memory_pool("weights"):
        tensor = make(100)
        del tensor
        assert cumem.trim() == 0
        tensor = make(200)
    assert holds_pattern(tensor)


def test_trim_inside_a_scope_is_made_good_when_it_ends() -> None:
    with cumem.use_memory_pool("draft"):
        gone = make(100)
    del gone
    with cumem.use_memory_pool("weights"):
        here = make(100)
        cumem.trim("draft")
    with cumem.use_memory_pool("weights"):
        more = make(100)
    assert tag_stats("draft").segment_bytes == 0
    del here, more


def test_a_tensor_outlives_a_trimmed_pool_through_sleep_and_wake() -> None:
    with cumem.use_memory_pool("weights"):
        tensor = make(5000, 1)
    cumem.trim()
    before = tensor.data_ptr()
    report = cumem.sleep()
    assert report.offloaded_bytes == 5120
    cumem.wake_up()
    assert tensor.data_ptr() == before
    assert holds_pattern(tensor, 1)


def test_a_scope_after_trim_gets_a_new_pool() -> None:
    with cumem.use_memory_pool("weights") as first:
        old = make(100, 1)
    before = first.id
    cumem.trim()
    with cumem.use_memory_pool("weights") as second:
        new = make(100, 2)
    assert second.id != before
    assert holds_pattern(old, 1)
    assert holds_pattern(new, 2)


def test_a_tensor_that_dies_asleep_leaves_the_others_whole(driver: DriverUnderTest) -> None:
    with cumem.use_memory_pool("weights"):
        first, second, third = (make(5000, seed) for seed in range(3))
    cumem.sleep()
    del second
    gc.collect()
    cumem.wake_up()
    assert holds_pattern(first, 0)
    assert holds_pattern(third, 2)
    with cumem.use_memory_pool("weights"):
        again = make(5000, 7)
    assert holds_pattern(first, 0)
    assert holds_pattern(again, 7)
    assert holds_pattern(third, 2)


def test_a_segment_that_dies_asleep_gives_everything_back(driver: DriverUnderTest) -> None:
    reserved = cumem.stats().reserved_addresses
    with cumem.use_memory_pool("weights"):
        gone = make(30 * MIB)
        kept = make(100, 1)
    cumem.sleep()
    del gone
    assert cumem.trim() == 30 * MIB
    stats = cumem.stats()
    assert stats.reserved_addresses - reserved == GRANULE
    assert stats.host_used_bytes == tag_stats("weights").backup_bytes == 512
    assert cumem.wake_up().mapped_bytes == GRANULE
    assert holds_pattern(kept, 1)


def test_a_module_that_dies_asleep_gives_everything_back(driver: DriverUnderTest) -> None:
    before = driver.used_bytes()
    with cumem.use_memory_pool("weights"), torch.device(driver.device):
        model = torch.nn.Sequential(*(torch.nn.Linear(64, 64) for _ in range(4)))
        model.register_buffer("table", torch.arange(1000.0))
    cumem.sleep()
    del model
    gc.collect()
    cumem.trim()
    assert not cumem.is_sleeping()
    assert driver.used_bytes() == before
    assert cumem.stats().host_used_bytes == 0
    assert cumem.wake_up().tags == frozenset()


def test_host_memory_goes_back_when_its_segment_dies_asleep_and_is_not_retained() -> None:
    cumem.configure(cumem.Options(retain_backup=False))
    with cumem.use_memory_pool("weights"):
        tensor = make(30 * MIB)
    cumem.sleep()
    del tensor
    cumem.trim()
    assert cumem.stats().host_bytes == 0


def test_tensors_may_die_on_another_thread_and_asleep() -> None:
    with cumem.use_memory_pool("weights"):
        tensors = [make(3000, seed) for seed in range(8)]
    cumem.sleep()
    dying = tensors[::2]
    del tensors[::2]
    in_thread(dying.clear)
    cumem.wake_up()
    assert all(holds_pattern(tensor, 1 + 2 * at) for at, tensor in enumerate(tensors))


def test_many_tensors_die_while_others_sleep_and_wake() -> None:
    with cumem.use_memory_pool("weights"):
        kept = make(50_000, 1)
    stop = threading.Event()

    def churn() -> int:
        rounds = 0
        while not stop.is_set():
            with cumem.use_memory_pool("churn"):
                tensor = make(3 * MIB)
            del tensor
            cumem.trim("churn")
            rounds += 1
        return rounds

    thread = threading.Thread(target=churn)
    thread.start()
    try:
        for _ in range(10):
            cumem.sleep(tags=["weights"])
            cumem.wake_up(["weights"])
            assert holds_pattern(kept, 1)
    finally:
        stop.set()
        thread.join(60)


def test_rounds_of_allocation_and_death_leave_no_addresses(driver: DriverUnderTest) -> None:
    reserved, used = cumem.stats().reserved_addresses, driver.used_bytes()
    for round_ in range(100):
        with cumem.use_memory_pool("weights"):
            tensor = make(1 + round_ * 40_000)
        if round_ % 2:
            cumem.sleep()
        del tensor
        cumem.trim()
    assert (cumem.stats().reserved_addresses, driver.used_bytes()) == (reserved, used)


@pytest.mark.needs("stream that cumem has never heard of")
def test_a_free_waits_for_work_that_still_writes(driver: DriverUnderTest) -> None:
    with cumem.use_memory_pool("weights"):
        tensor = make(4096)
    stream = driver.emulator.new_stream()
    driver.emulator.enqueue(stream=stream, write=(tensor.data_ptr(), b"\x01" * 4096), delay=0.05)
    del tensor
    cumem.trim()
    ledger = driver.emulator.ledger()
    assert (ledger["pending_work"], ledger["dead_contexts"]) == (0, 0)


@pytest.mark.needs("stream that cumem has never heard of")
def test_trim_waits_for_all_work_where_it_gives_something_back(driver: DriverUnderTest) -> None:
    with cumem.use_memory_pool("weights"):
        tensor = make(4096)
    with cumem.use_memory_pool("draft"):
        gone = make(4096)
    emulator = driver.emulator
    stream = emulator.new_stream()
    assert cumem.trim("weights") == 0
    emulator.enqueue(stream=stream, write=(tensor.data_ptr(), b"\x01" * 4096), delay=0.1)
    assert cumem.trim("draft") == 0
    assert emulator.ledger()["pending_work"] == 1
    del gone
    assert cumem.trim("draft") == GRANULE
    assert emulator.ledger()["pending_work"] == 0


@pytest.mark.needs("capture without kernels")
def test_a_free_during_a_capture_is_put_off(driver: DriverUnderTest) -> None:
    with cumem.use_memory_pool("weights"):
        tensor = make(4096)
    emulator = driver.emulator
    emulator.begin_capture(emulator.stream(1))
    del tensor
    cumem.trim()
    emulator.end_capture(emulator.stream(1))
    cumem.trim()
    assert cumem.stats().waiting_frees == 0
    assert driver.used_bytes() == 0
