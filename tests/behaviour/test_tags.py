"""In which order may tags sleep and wake, and what do levels and policies do to each?"""

from __future__ import annotations

import itertools

import pytest
from support import MIB, DriverUnderTest, fill_pattern, holds_pattern, make, state, tag_stats
from tags_support import ORDERS, TAGS, build, intact, is_filled

import cumem

# Part of the tags


@pytest.mark.parametrize("slept", ORDERS, ids="-".join)
@pytest.mark.parametrize("woken", ORDERS, ids="-".join)
def test_tags_sleep_and_wake_one_by_one_in_any_order(
    driver: DriverUnderTest, slept: tuple[str, ...], woken: tuple[str, ...]
) -> None:
    tensors = build()
    before = driver.used_bytes()
    for count, tag in enumerate(slept, start=1):
        report = cumem.sleep(tags=[tag])
        assert report.tags == {tag}
        assert cumem.sleeping_tags() == set(slept[:count])
        assert intact(tensors, slept[count:])
    for count, tag in enumerate(woken, start=1):
        assert cumem.is_sleeping()
        assert cumem.wake_up([tag]).tags == {tag}
        assert cumem.sleeping_tags() == set(woken[count:])
        assert intact(tensors, woken[:count])
    assert not cumem.is_sleeping()
    assert driver.used_bytes() == before


@pytest.mark.parametrize(
    "first", [pair for n in (1, 2) for pair in itertools.combinations(TAGS, n)]
)
def test_a_part_wakes_and_then_the_rest(first: tuple[str, ...]) -> None:
    tensors = build()
    cumem.sleep()
    cumem.wake_up(first)
    assert intact(tensors, first)
    assert {tag for tag in TAGS if not cumem.is_mapped(tensors[tag])} == set(TAGS) - set(first)
    rest = cumem.wake_up()
    assert rest.tags == set(TAGS) - set(first)
    assert intact(tensors)


def test_an_awake_tag_beside_a_sleeping_one_is_passed_over() -> None:
    tensors = build()
    cumem.sleep()
    cumem.wake_up(["weights"])
    fill_pattern(tensors["weights"], 99)
    report = cumem.wake_up(["weights", "kv_cache"])
    assert report.tags == {"kv_cache"}
    assert holds_pattern(tensors["weights"], 99)
    assert intact(tensors, ["kv_cache"])
    assert cumem.sleeping_tags() == {"draft"}


def test_a_backup_is_held_until_its_own_tag_is_awake() -> None:
    cumem.configure(cumem.Options(retain_backup=False))
    tensors = build()
    cumem.sleep(offload_tags=["weights"])
    held = tag_stats("weights").backup_bytes
    cumem.wake_up(["kv_cache"])
    assert tag_stats("weights").backup_bytes == held > 0
    cumem.wake_up(["weights"])
    assert tag_stats("weights").backup_bytes == 0
    assert intact(tensors, ["weights"])


def test_tags_given_twice_count_once() -> None:
    tensors = build()
    assert cumem.sleep(tags=["weights", "weights"]).tags == {"weights"}
    assert cumem.wake_up(tag for tag in ("weights", "weights")).tags == {"weights"}
    assert intact(tensors)


@pytest.mark.parametrize("kind", [list, tuple, set, frozenset, iter, dict.fromkeys])
def test_tags_may_be_any_iterable(kind: type) -> None:
    tensors = build()
    assert cumem.sleep(tags=kind(["weights", "draft"])).tags == {"weights", "draft"}
    assert cumem.wake_up(kind(["weights", "draft"])).tags == {"weights", "draft"}
    assert intact(tensors)


def test_no_tags_means_none_and_not_all() -> None:
    tensors = build()
    before = state()
    assert cumem.sleep(tags=[]).tags == frozenset()
    assert state() == before
    cumem.sleep()
    before = state()
    assert cumem.wake_up([]).tags == frozenset()
    assert state() == before
    cumem.wake_up()
    assert intact(tensors)


# Repeats


def test_repeats_change_nothing(driver: DriverUnderTest) -> None:
    tensors = build()
    assert cumem.wake_up().tags == frozenset()
    cumem.sleep()
    before, used, created = state(), driver.used_bytes(), cumem.stats().handles_created
    again = cumem.sleep()
    assert (again.tags, again.freed_bytes, again.offloaded_bytes) == (frozenset(), 0, 0)
    assert (state(), driver.used_bytes()) == (before, used)
    cumem.sleep(level=2)
    assert state() == before
    cumem.wake_up()
    awake, used, created = state(), driver.used_bytes(), cumem.stats().handles_created
    again = cumem.wake_up()
    assert (again.tags, again.mapped_bytes, again.restored_bytes) == (frozenset(), 0, 0)
    assert (state(), driver.used_bytes(), cumem.stats().handles_created) == (awake, used, created)
    assert intact(tensors)


def test_many_cycles_end_where_they_began(driver: DriverUnderTest) -> None:
    tensors = build()
    cumem.sleep()
    cumem.wake_up()
    before, used, host = state(), driver.used_bytes(), cumem.stats().host_bytes
    for _ in range(20):
        cumem.sleep()
        cumem.wake_up()
    stats = cumem.stats()
    assert (state(), driver.used_bytes(), stats.host_bytes) == (before, used, host)
    assert intact(tensors)


# Levels and policies


def test_level_0_releases_nothing() -> None:
    tensors = build()
    before = state()
    assert cumem.sleep(level=0).freed_bytes == 0
    assert state() == before
    assert not cumem.is_sleeping()
    assert intact(tensors)


def test_level_1_follows_the_policy_of_each_pool(driver: DriverUnderTest) -> None:
    tensors = {}
    policies = (cumem.OnSleep.OFFLOAD, cumem.OnSleep.DISCARD, cumem.OnSleep.KEEP)
    for seed, policy in enumerate(policies):
        with cumem.use_memory_pool(f"tag_{policy.value}", on_sleep=policy):
            tensors[policy] = make(3 * MIB, seed)
    report = cumem.sleep(level=1)
    assert cumem.sleeping_tags() == {"tag_offload", "tag_discard"}
    assert cumem.is_mapped(tensors[cumem.OnSleep.KEEP])
    assert holds_pattern(tensors[cumem.OnSleep.KEEP], 2)
    assert report.offloaded_bytes == tag_stats("tag_offload").live_bytes
    assert report.discarded_bytes == tag_stats("tag_discard").live_bytes
    woke = cumem.wake_up(fill="zero")
    assert woke.undefined == {"tag_discard"}
    assert holds_pattern(tensors[cumem.OnSleep.OFFLOAD], 0)
    assert is_filled(tensors[cumem.OnSleep.DISCARD], 0)


@pytest.mark.parametrize("policy", ["offload", "discard"])
def test_level_2_discards_everything_but_keep_pools(policy: str) -> None:
    with cumem.use_memory_pool("resident", on_sleep="keep"):
        resident = make(100, 50)
    tensors = build(on_sleep=policy)
    report = cumem.sleep(level=2)
    assert report.offloaded_bytes == report.copied_bytes == report.host_bytes == 0
    assert report.discarded_bytes == sum(tag_stats(tag).live_bytes for tag in TAGS)
    assert cumem.sleeping_tags() == set(TAGS)
    assert holds_pattern(resident, 50)
    woke = cumem.wake_up(fill="poison")
    assert woke.restored_bytes == 0
    assert woke.undefined == set(TAGS)
    assert all(is_filled(tensor, 0xFF) for tensor in tensors.values())


def test_the_kv_cache_is_discarded_and_every_other_tag_offloaded_by_default() -> None:
    tensors = build(on_sleep=None)
    cumem.configure(cumem.Options(warn_empty_scope=False))
    for tag in TAGS:
        with cumem.use_memory_pool(tag) as pool:
            assert pool.on_sleep.value == ("discard" if tag == "kv_cache" else "offload")
    cumem.sleep()
    assert cumem.wake_up(fill="poison").undefined == {"kv_cache"}
    assert intact(tensors, ["weights", "draft"])
    assert is_filled(tensors["kv_cache"], 0xFF)


def test_offload_tags_back_these_up_and_discard_all_others() -> None:
    tensors = build(on_sleep=None)
    with cumem.use_memory_pool("resident", on_sleep="keep"):
        resident = make(100, 50)
    with cumem.use_memory_pool("weights"):
        kept = cumem.keep(make(1000, 51))
    report = cumem.sleep(offload_tags=["kv_cache"])
    assert report.tags == set(TAGS)
    assert cumem.is_mapped(resident)
    assert cumem.wake_up(fill="zero").undefined == {"weights", "draft"}
    assert intact(tensors, ["kv_cache"])
    assert is_filled(tensors["weights"], 0)
    assert is_filled(tensors["draft"], 0)
    assert holds_pattern(kept, 51)
    assert holds_pattern(resident, 50)


def test_no_offload_tags_discards_all() -> None:
    tensors = build()
    assert cumem.sleep(offload_tags=[]).offloaded_bytes == 0
    assert cumem.wake_up(fill="zero").undefined == set(TAGS)
    assert all(is_filled(tensor, 0) for tensor in tensors.values())


def test_tags_and_offload_tags_together_touch_only_the_tags() -> None:
    tensors = build()
    report = cumem.sleep(tags=["weights", "draft"], offload_tags=["weights", "kv_cache"])
    assert report.tags == {"weights", "draft"}
    assert cumem.sleeping_tags() == {"weights", "draft"}
    assert cumem.wake_up(fill="zero").undefined == {"draft"}
    assert intact(tensors, ["weights", "kv_cache"])


def test_the_policy_is_part_of_the_pool() -> None:
    with cumem.use_memory_pool("weights", on_sleep="discard") as first:
        lost = make(1024, 1)
    with cumem.use_memory_pool("weights", on_sleep="offload") as second:
        saved = make(1024, 2)
    assert first.id != second.id
    cumem.sleep()
    assert cumem.wake_up(fill="poison").undefined == {"weights"}
    assert holds_pattern(saved, 2)
    assert is_filled(lost, 0xFF)


def test_a_cached_block_of_one_tag_is_never_given_to_another(driver: DriverUnderTest) -> None:
    with cumem.use_memory_pool("kv_cache"):
        large = make(40 * MIB)
        del large
        small = make(8)
    with cumem.use_memory_pool("weights"):
        weights = make(30 * MIB, 3)
    assert cumem.tag_of(weights) == "weights"
    cumem.sleep(offload_tags=["weights"])
    cumem.wake_up(["weights"])
    assert holds_pattern(weights, 3)
    assert not cumem.is_mapped(small)
