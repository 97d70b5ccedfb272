"""Does memory of cumem's own sleep and wake as torch's segments do?"""

from __future__ import annotations

import threading

import pytest
import torch
from owned_support import owned
from support import MIB, DriverUnderTest, fill_pattern, holds_pattern, in_thread, make

import cumem
from cumem import _owned


def test_it_sleeps_and_wakes_with_the_other_memory_of_its_tag(driver: DriverUnderTest) -> None:
    own = owned(3 * MIB + 5, seed=1)
    with cumem.use_memory_pool("weights"):
        torchs = make(5000, seed=2)
    place = own.data_ptr()
    report = cumem.sleep()
    assert report.offloaded_bytes == 3 * MIB + 5 + 5120
    assert not cumem.is_mapped(own)
    cumem.check()
    cumem.wake_up()
    assert own.data_ptr() == place
    assert holds_pattern(own, 1)
    assert holds_pattern(torchs, 2)
    assert cumem.sleep().copied_bytes <= 5120  # nothing changed
    cumem.wake_up()
    assert holds_pattern(own, 1)


def test_contents_that_are_discarded_move_the_epoch() -> None:
    tensor = owned(MIB, tag="kv_cache")
    before = cumem.epoch("kv_cache")
    assert cumem.sleep().discarded_bytes == MIB
    assert cumem.epoch("kv_cache") == before + 1
    assert cumem.wake_up(fill="zero").undefined == {"kv_cache"}
    assert not tensor.any()


def test_memory_that_keeps_stays_mapped() -> None:
    tensor = owned(MIB, on_sleep="keep")
    cumem.sleep()
    assert holds_pattern(tensor)


def test_a_kept_tensor_survives_alone_in_a_segment_that_is_discarded() -> None:
    segment = _owned.allocate(3 * MIB, tag="weights")
    kept = segment.tensor(torch.uint8, (1001,), offset=MIB + 7)
    lost = segment.tensor(torch.uint8, (MIB,))
    fill_pattern(kept, 3)
    fill_pattern(lost, 4)
    cumem.keep(kept)
    report = cumem.sleep(level=2)
    assert 1001 <= report.offloaded_bytes < 1001 + 16
    assert report.discarded_bytes == 3 * MIB - report.offloaded_bytes
    cumem.wake_up(fill="zero")
    assert holds_pattern(kept, 3)
    assert not lost.any()


def test_a_switch_takes_it_along() -> None:
    first, second = owned(3 * MIB, 1, tag="a"), owned(2 * MIB, 2, tag="b")
    cumem.sleep(tags=["b"])
    cumem.switch(sleep_tags=["a"], wake_tags=["b"])
    assert cumem.sleeping_tags() == {"a"}
    assert holds_pattern(second, 2)
    cumem.switch(sleep_tags=["b"], wake_tags=["a"])
    assert holds_pattern(first, 1)
    cumem.wake_up()


def test_a_tensor_over_sleeping_memory_is_refused() -> None:
    segment = _owned.allocate(100, tag="weights")
    cumem.sleep()
    with pytest.raises(cumem.AsleepError, match="weights"):
        segment.tensor(torch.uint8, (100,))
    cumem.wake_up()
    assert segment.tensor(torch.uint8, (100,)).numel() == 100


def test_a_tag_is_not_put_to_sleep_while_its_memory_is_filled() -> None:
    tensor = owned(100)
    with _owned.writing("weights"), pytest.raises(cumem.BusyError, match="weights"):
        in_thread(cumem.sleep)
    cumem.sleep()
    cumem.wake_up()
    assert holds_pattern(tensor)


def test_allocations_and_sleeps_from_several_threads_agree() -> None:
    stop = threading.Event()
    failures: list[BaseException] = []

    def work(seed: int) -> None:
        try:
            while not stop.is_set():
                tensor = owned(1000 + seed, seed, tag=f"own{seed}")
                assert holds_pattern(tensor, seed)
                del tensor
        except BaseException as error:  # noqa: BLE001 - shown below
            failures.append(error)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(2)]
    for thread in threads:
        thread.start()
    steady = owned(MIB, 9)
    for _ in range(5):
        cumem.sleep(tags=["weights"])
        cumem.check()
        cumem.wake_up()
    stop.set()
    for thread in threads:
        thread.join(60)
    assert not failures, failures
    assert holds_pattern(steady, 9)
