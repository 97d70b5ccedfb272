"""Do tags change places in the room of one, with every byte and an exact account?"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from support import (
    MIB,
    DriverUnderTest,
    fill_pattern,
    holds_pattern,
    in_thread,
    make,
    scope_on_a_thread,
    state,
    tag_stats,
)

import cumem
from cumem.testing import EmulatedDriver

SIZES = (12 * MIB, 300, 16 * MIB, 14 * MIB + 13)
SLACK = 22 * MIB  # more than the largest segment


def build(tag: str, seed: int, sizes: tuple[int, ...] = SIZES) -> list[torch.Tensor]:
    with cumem.use_memory_pool(tag):
        return [make(size, seed + index) for index, size in enumerate(sizes)]


def intact(tensors: list[torch.Tensor], seed: int) -> bool:
    return all(holds_pattern(tensor, seed + index) for index, tensor in enumerate(tensors))


class Pair:
    """``a`` sleeps and ``b`` is awake."""

    def __init__(self) -> None:
        self.a = build("a", 10)
        cumem.sleep(tags=["a"])
        self.b = build("b", 20)

    def go(self, **options: str) -> cumem.SwitchReport:
        return cumem.switch(sleep_tags=["b"], wake_tags=["a"], **options)

    def back(self) -> cumem.SwitchReport:
        return cumem.switch(sleep_tags=["a"], wake_tags=["b"])

    def is_unchanged(self) -> bool:
        return cumem.sleeping_tags() == {"a"} and intact(self.b, 20)

    def is_switched(self) -> bool:
        return cumem.sleeping_tags() == {"b"} and intact(self.a, 10)

    def whole(self) -> bool:
        """Whatever is awake has its bytes."""
        groups = [(tensor, 10 + i) for i, tensor in enumerate(self.a)]
        groups += [(tensor, 20 + i) for i, tensor in enumerate(self.b)]
        return all(not cumem.is_mapped(at) or holds_pattern(at, seed) for at, seed in groups)


def test_two_tags_change_places_again_and_again() -> None:
    pair = Pair()
    places = [tensor.data_ptr() for tensor in pair.a + pair.b]
    for _ in range(3):
        pair.go()
        assert pair.is_switched()
        cumem.check()
        pair.back()
        assert pair.is_unchanged()
    assert [tensor.data_ptr() for tensor in pair.a + pair.b] == places


def test_the_report_adds_up() -> None:
    pair = Pair()
    a, b = tag_stats("a"), tag_stats("b")
    report = pair.go()
    assert report.sleep.tags == {"b"}
    assert report.wake.tags == {"a"}
    assert report.sleep.freed_bytes <= b.segment_bytes  # the rest changed hands
    assert report.sleep.offloaded_bytes == b.live_bytes
    assert report.sleep.copied_bytes + report.sleep.skipped_bytes == b.live_bytes
    assert report.sleep.discarded_bytes == 0
    assert report.wake.mapped_bytes == a.segment_bytes
    assert report.wake.restored_bytes == a.live_bytes
    assert report.wake.undefined == frozenset()
    assert report.sleep.devices == report.wake.devices == (0,)
    assert report.sleep.seconds == report.wake.seconds == report.seconds > 0
    assert "switched" in str(report)


def test_the_device_needs_room_for_one(driver: DriverUnderTest) -> None:
    pair = Pair()
    with driver.another_tenant(leaves=SLACK):
        for _ in range(2):
            pair.go()
            assert pair.is_switched()
            pair.back()
            assert pair.is_unchanged()


def test_only_what_was_written_is_copied_again() -> None:
    pair = Pair()
    pair.go()
    pair.back()
    report = pair.go()
    if report.sleep.clean_check == "digest":
        assert (report.sleep.copied_bytes, report.sleep.skipped_bytes) == (
            0,
            report.sleep.offloaded_bytes,
        )
    fill_pattern(pair.a[0], 10)
    pair.a[2][5] ^= 1
    report = pair.back()
    pair.go()
    pair.a[2][5] ^= 1
    assert pair.is_switched()
    if report.sleep.clean_check == "digest":
        assert 0 < report.sleep.copied_bytes <= 4 * MIB


def test_each_pool_sleeps_by_its_own_policy() -> None:
    with cumem.use_memory_pool("kv_cache"):
        kv = make(6 * MIB, 1)
    with cumem.use_memory_pool("fixed", on_sleep="keep"):
        fixed = make(5000, 2)
    weights = build("weights", 30)
    cumem.sleep(tags=["weights"])
    epoch = cumem.epoch("kv_cache")
    report = cumem.switch(sleep_tags=["kv_cache", "fixed"], wake_tags=["weights"])
    assert report.sleep.tags == {"kv_cache"}
    assert (report.sleep.copied_bytes, report.sleep.offloaded_bytes) == (0, 0)
    assert report.sleep.discarded_bytes >= 6 * MIB
    assert cumem.epoch("kv_cache") == epoch + 1
    assert intact(weights, 30)
    assert holds_pattern(fixed, 2)
    report = cumem.switch(sleep_tags=["weights"], wake_tags=["kv_cache"], fill="poison")
    assert report.wake.undefined == {"kv_cache"}
    assert bool((kv == 0xFF).all())
    cumem.wake_up()
    assert intact(weights, 30)


def test_kept_contents_come_back_from_a_discarded_pool() -> None:
    with cumem.use_memory_pool("kv_cache"):
        kept, lost = cumem.keep(make(3 * MIB, 1)), make(12 * MIB, 2)
    weights = build("weights", 30)
    cumem.sleep(tags=["weights"])
    cumem.switch(sleep_tags=["kv_cache"], wake_tags=["weights"])
    cumem.switch(sleep_tags=["weights"], wake_tags=["kv_cache"])
    assert holds_pattern(kept, 1)
    cumem.wake_up()
    assert intact(weights, 30)
    del lost


def test_a_switch_of_what_is_there_already_does_nothing() -> None:
    pair = Pair()
    pair.go()
    before = state()
    for report in (pair.go(), cumem.switch(sleep_tags=[], wake_tags=[])):
        assert report.sleep.tags == report.wake.tags == frozenset()
        assert report.sleep.freed_bytes == report.wake.mapped_bytes == 0
    assert state() == before
    assert pair.is_switched()


@pytest.mark.parametrize(
    ("call", "error"),
    [
        ({"sleep_tags": ["b"], "wake_tags": ["b"]}, ValueError),
        ({"sleep_tags": ["c"], "wake_tags": ["a"]}, ValueError),
        ({"sleep_tags": ["b"], "wake_tags": ["c"]}, ValueError),
        ({"sleep_tags": ["b"], "wake_tags": ["a"], "fill": "ones"}, ValueError),
        ({"sleep_tags": "b", "wake_tags": ["a"]}, TypeError),
        ({"sleep_tags": ["b"], "wake_tags": "a"}, TypeError),
        ({"sleep_tags": ["b"], "wake_tags": [3]}, TypeError),
        ({"sleep_tags": None, "wake_tags": ["a"]}, TypeError),
    ],
)
def test_a_wrong_argument_changes_nothing(call: dict[str, object], error: type[Exception]) -> None:
    pair = Pair()
    before = state()
    with pytest.raises(error):
        cumem.switch(**call)
    assert state() == before
    assert pair.is_unchanged()


@pytest.mark.parametrize("tag", ["a", "b"])
def test_a_switch_beside_a_scope_of_either_tag_is_refused(tag: str) -> None:
    pair = Pair()
    with scope_on_a_thread(tag, name="loader-3"):
        before = state()
        with pytest.raises(cumem.BusyError, match="loader-3"):
            pair.go()
        assert state() == before
    assert pair.is_unchanged()
    pair.go()
    assert pair.is_switched()


def test_without_host_memory_nothing_is_changed() -> None:
    pair = Pair()
    held = cumem.stats().host_bytes
    cumem.configure(cumem.Options(host_limit_bytes=held + MIB))
    before = state()
    with pytest.raises(cumem.HostOutOfMemoryError, match="switch"):
        pair.go()
    assert state() == before
    assert pair.is_unchanged()
    cumem.configure(cumem.Options())
    pair.go()
    assert pair.is_switched()


@pytest.mark.parametrize("way", [Pair.go, Pair.back], ids=["again", "back"])
def test_without_device_memory_it_goes_on_either_way(
    driver: DriverUnderTest, way: Callable[[Pair], cumem.SwitchReport]
) -> None:
    pair = Pair()
    more = build("a", 40, (60 * MIB,))
    cumem.sleep(tags=["a"])
    with driver.another_tenant(leaves=8 * MIB):
        with pytest.raises(cumem.DeviceOutOfMemoryError, match="switch"):
            pair.go()
        assert pair.whole()
        cumem.check()
    way(pair)
    assert pair.is_switched() if way is Pair.go else pair.is_unchanged()
    cumem.wake_up()
    assert pair.whole()
    assert intact(more, 40)


@pytest.mark.needs("failures on demand")
@pytest.mark.parametrize("call", ["cuMemcpyDtoHAsync", "cuMemcpyHtoDAsync", "cuMemMap"])
@pytest.mark.parametrize("nth", [1, 2])
def test_a_driver_that_refuses_midway_costs_no_byte(
    emulator: EmulatedDriver, call: str, nth: int
) -> None:
    pair = Pair()
    emulator.fail(call, nth, "CUDA_ERROR_UNKNOWN")
    with pytest.raises(cumem.DriverError, match="switch back"):
        pair.go()
    assert pair.whole()
    cumem.check()
    pair.back()
    assert pair.is_unchanged()


def test_a_switch_of_several_threads_is_one_switch() -> None:
    pair = Pair()
    reports = [in_thread(pair.go) for _ in range(2)]
    assert sorted(len(report.wake.tags) for report in reports) == [0, 1]
    assert pair.is_switched()
