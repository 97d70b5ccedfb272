"""Can work start before everything is awake, and what happens when the wake fails?"""

from __future__ import annotations

import threading
import time

import pytest
import torch
from support import (
    MIB,
    contents_of,
    holds_pattern,
    in_thread,
    make,
    raw,
    tag_stats,
)

import cumem
from cumem.testing import EmulatedDriver

SIZES = (12 * MIB, 11 * MIB, 13 * MIB, 12 * MIB + 5)


def build(tag: str = "weights", seed: int = 0) -> list[torch.Tensor]:
    with cumem.use_memory_pool(tag):
        return [make(size, seed + index) for index, size in enumerate(SIZES)]


def asleep(tag: str = "weights", seed: int = 0) -> list[torch.Tensor]:
    tensors = build(tag, seed)
    cumem.sleep(tags=[tag])
    return tensors


def intact(tensors: list[torch.Tensor], seed: int = 0) -> bool:
    return all(holds_pattern(tensor, seed + index) for index, tensor in enumerate(tensors))


def arrives(tensor: torch.Tensor, seed: int) -> bool:
    """Reads without asking whether it counts as awake already."""
    return torch.equal(raw(tensor).cpu(), contents_of(tensor, seed))


@pytest.fixture
def slow(emulator: EmulatedDriver) -> EmulatedDriver:
    """Each of the segments takes a quarter of a second to come back."""
    emulator.set_bandwidth(48 * MIB)
    return emulator


def in_a_moment(condition: object) -> bool:
    end = time.monotonic() + 30
    while time.monotonic() < end:
        if condition():
            return True
        time.sleep(0.001)
    return False


def test_everything_is_awake_after_the_wait_and_the_report_adds_up() -> None:
    tensors = asleep()
    stats = tag_stats("weights")
    handle = cumem.wake_up(wait=False)
    report = handle.wait()
    assert handle.done()
    assert not cumem.is_sleeping()
    assert intact(tensors)
    assert report.mapped_bytes == stats.segment_bytes
    assert report.restored_bytes == stats.live_bytes
    assert (report.tags, report.undefined, report.devices) == ({"weights"}, frozenset(), (0,))
    assert report.seconds > 0
    assert handle.wait() == report


def test_a_wake_of_nothing_is_over_at_once() -> None:
    tensors = build()
    report = cumem.wake_up(wait=False).wait()
    assert (report.tags, report.mapped_bytes) == (frozenset(), 0)
    assert intact(tensors)


def test_only_these_tags_are_woken() -> None:
    weights, other = asleep("weights"), asleep("other", 40)
    assert cumem.wake_up(["other"], wait=False).wait().tags == {"other"}
    assert cumem.sleeping_tags() == {"weights"}
    assert intact(other, 40)
    cumem.wake_up()
    assert intact(weights)


def test_each_tensor_can_be_waited_for() -> None:
    tensors = asleep()
    handle = cumem.wake_up(wait=False)
    for seed in (2, 0, 3, 1):
        handle.wait_for(tensors[seed])
        assert arrives(tensors[seed], seed)
    handle.wait()


def test_each_tag_can_be_waited_for() -> None:
    first, second = asleep("first"), asleep("second", 40)
    handle = cumem.wake_up(wait=False)
    handle.wait_for_tag("second")
    assert all(arrives(tensor, 40 + index) for index, tensor in enumerate(second))
    handle.wait_for_tag("first")
    assert all(arrives(tensor, index) for index, tensor in enumerate(first))
    with pytest.raises(ValueError, match="unknown tag"):
        handle.wait_for_tag("third")
    with pytest.raises(TypeError):
        handle.wait_for_tag(3)
    handle.wait()


def test_memory_of_others_needs_no_waiting() -> None:
    tensors, other = asleep(), build("other", 40)
    handle = cumem.wake_up(wait=False)
    handle.wait_for(other[0])
    handle.wait_for(torch.zeros(10))
    handle.wait_for(torch.empty(0))
    handle.wait()
    handle.wait_for(tensors[0])
    assert intact(tensors)
    assert intact(other, 40)


def test_many_threads_may_wait() -> None:
    tensors = asleep()
    handle = cumem.wake_up(wait=False)
    seen: list[bool] = []

    def use(seed: int) -> None:
        handle.wait_for(tensors[seed])
        seen.append(arrives(tensors[seed], seed))

    threads = [threading.Thread(target=use, args=(index % 4,)) for index in range(12)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert seen == [True] * 12
    handle.wait()


@pytest.mark.needs("a bandwidth that can be set")
def test_segments_are_awake_one_by_one(slow: EmulatedDriver) -> None:
    tensors = asleep()
    handle = cumem.wake_up(wait=False)
    assert in_a_moment(lambda: cumem.is_mapped(tensors[0]))
    assert not cumem.is_mapped(tensors[3])
    assert not handle.done()
    assert cumem.sleeping_tags() == {"weights"}
    assert holds_pattern(tensors[0], 0)
    assert in_a_moment(lambda: cumem.is_mapped(tensors[1]))
    assert not cumem.is_mapped(tensors[3])
    handle.wait()
    assert intact(tensors)


def test_discarded_contents_are_filled_and_undefined() -> None:
    tensors = build()
    cumem.sleep(level=2)
    report = cumem.wake_up(fill="poison", wait=False).wait()
    assert report.undefined == {"weights"}
    assert report.restored_bytes == 0
    assert all(bool((tensor == 0xFF).all()) for tensor in tensors)


def test_verify_needs_everything_at_once() -> None:
    tensors = asleep()
    with pytest.raises(ValueError, match="verify"):
        cumem.wake_up(wait=False, verify=True)
    cumem.wake_up()
    assert intact(tensors)


# Other calls join it


def test_a_sleep_joins_the_wake() -> None:
    tensors = asleep()
    handle = cumem.wake_up(wait=False)
    report = cumem.sleep()
    assert handle.done()
    assert report.tags == {"weights"}
    cumem.wake_up()
    assert intact(tensors)


def test_a_wake_joins_the_wake() -> None:
    tensors = asleep()
    cumem.wake_up(wait=False)
    assert cumem.wake_up().tags == frozenset()
    assert intact(tensors)


def test_a_switch_and_another_asynchronous_wake_join_the_wake() -> None:
    first, second = asleep("first"), asleep("second", 40)
    cumem.wake_up(["first"], wait=False)
    cumem.wake_up(["second"], wait=False)
    cumem.switch(sleep_tags=["first", "second"], wake_tags=[])
    assert cumem.sleeping_tags() == {"first", "second"}
    cumem.wake_up()
    assert intact(first)
    assert intact(second, 40)


def test_a_scope_may_be_entered_while_it_goes_on() -> None:
    tensors = build()
    made = []
    for seed in range(20):
        cumem.sleep()
        handle = cumem.wake_up(wait=False)
        with cumem.use_memory_pool("weights"):
            made.append(make(300, seed))
        handle.wait()
    assert intact(tensors)
    assert all(holds_pattern(tensor, seed) for seed, tensor in enumerate(made))


def test_a_scope_of_another_tag_does_not_wait() -> None:
    tensors = asleep()
    with cumem.use_memory_pool("other"):
        handle = cumem.wake_up(wait=False)
        inside = make(300, 5)
    handle.wait()
    assert intact(tensors)
    assert holds_pattern(inside, 5)


def test_tensors_may_die_meanwhile() -> None:
    tensors = asleep()
    handle = cumem.wake_up(wait=False)
    del tensors[1]
    cumem.trim()
    handle.wait()
    assert holds_pattern(tensors[0], 0)
    assert holds_pattern(tensors[1], 2)
    cumem.check()


def test_hooks_run_once_in_a_thread_of_their_own_and_may_not_sleep() -> None:
    tensors = asleep()
    told: list[tuple[str, ...]] = []
    refused: list[cumem.BusyError] = []

    def hook(segments: tuple[cumem.SegmentRange, ...]) -> None:
        told.append((threading.current_thread().name, *{entry.tag for entry in segments}))
        for call in (cumem.sleep, cumem.wake_up, lambda: cumem.wake_up(wait=False)):
            try:
                call()
            except cumem.BusyError as error:
                refused.append(error)

    registered = cumem.on_after_map(hook)
    handle = cumem.wake_up(wait=False)
    handle.wait()
    registered.remove()
    assert told == [("cumem-wake", "weights")]
    assert len(refused) == 3
    assert intact(tensors)


def test_a_hook_that_raises_is_told_by_the_wait() -> None:
    tensors = asleep()

    def hook(_segments: object) -> None:
        raise KeyError("mine")

    registered = cumem.on_after_map(hook)
    handle = cumem.wake_up(wait=False)
    with pytest.raises(cumem.CumemError, match="on_after_map"):
        handle.wait()
    registered.remove()
    assert not cumem.is_sleeping()
    assert intact(tensors)


def test_a_wake_may_be_started_by_one_thread_and_awaited_by_another() -> None:
    tensors = asleep()
    handle = in_thread(lambda: cumem.wake_up(wait=False))
    assert handle.wait().tags == {"weights"}
    assert intact(tensors)
