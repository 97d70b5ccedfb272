"""What do tags, levels and policies do to memory and contents?"""

from __future__ import annotations

import itertools
from collections.abc import Iterable

import pytest
import torch
from support import (
    GRANULE,
    MIB,
    DriverUnderTest,
    fill_pattern,
    holds_pattern,
    make,
    raw,
    state,
    tag_stats,
)

import cumem

TAGS = ("weights", "kv_cache", "draft")
ORDERS = list(itertools.permutations(TAGS))
SEEDS = {tag: seed for seed, tag in enumerate(TAGS)}


def build(*, on_sleep: str | None = "offload", size: int = 3 * MIB) -> dict[str, torch.Tensor]:
    """A tensor with contents of its own in each tag."""
    tensors = {}
    for tag in TAGS:
        with cumem.use_memory_pool(tag, on_sleep=on_sleep):
            tensors[tag] = make(size, SEEDS[tag])
    return tensors


def intact(tensors: dict[str, torch.Tensor], tags: Iterable[str] = TAGS) -> bool:
    return all(holds_pattern(tensors[tag], SEEDS[tag]) for tag in tags)


def is_filled(tensor: torch.Tensor, value: int) -> bool:
    return bool((raw(tensor) == value).all())


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


# What survives


def keep_tensor(tensors: list[torch.Tensor]) -> None:
    for tensor in tensors:
        assert cumem.keep(tensor) is tensor


def keep_pytree(tensors: list[torch.Tensor]) -> None:
    first, *rest = tensors
    cumem.keep({"first": first, "rest": [tuple(rest)]})


def keep_module(tensors: list[torch.Tensor]) -> None:
    module = torch.nn.Module()
    for index, tensor in enumerate(tensors):
        module.register_buffer(f"buffer_{index}", tensor, persistent=False)
    assert cumem.keep(module) is module


def keep_views(tensors: list[torch.Tensor]) -> None:
    cumem.keep([tensor[:1] for tensor in tensors])


@pytest.mark.parametrize("keeper", [keep_tensor, keep_pytree, keep_module, keep_views])
@pytest.mark.parametrize("call", [{"level": 1}, {"level": 2}, {"offload_tags": []}], ids=str)
def test_kept_contents_survive_every_sleep(keeper: object, call: dict[str, object]) -> None:
    with cumem.use_memory_pool("cache", on_sleep="discard"):
        lost = make(4096, 1)
        kept = [make(size, size) for size in (1, 777, 3 * MIB + 1)]
    keeper(kept)
    for _ in range(2):
        cumem.sleep(**call)
        assert cumem.wake_up(fill="poison").undefined == {"cache"}
        assert all(holds_pattern(tensor, tensor.numel()) for tensor in kept)
        assert is_filled(lost, 0xFF)


@pytest.mark.parametrize("size", [1, 777, 1024, MIB + 3])
def test_a_tag_whose_contents_are_all_kept_loses_nothing(size: int) -> None:
    with cumem.use_memory_pool("cache", on_sleep="discard"):
        tensors = cumem.keep([make(size, seed) for seed in range(3)])
    before = cumem.epoch("cache")
    report = cumem.sleep()
    assert report.discarded_bytes == 0
    assert cumem.wake_up().undefined == frozenset()
    assert cumem.epoch("cache") == before
    assert all(holds_pattern(tensor, seed) for seed, tensor in enumerate(tensors))


def test_keeping_contents_does_not_keep_memory_alive() -> None:
    with cumem.use_memory_pool("cache", on_sleep="discard"):
        kept = cumem.keep(make(1000))
        assert tag_stats("cache").live_bytes > 0
    del kept
    assert tag_stats("cache").live_bytes == 0
    assert cumem.trim("cache") == GRANULE


def test_a_new_tensor_at_the_address_of_a_kept_one_is_not_kept() -> None:
    with cumem.use_memory_pool("cache", on_sleep="discard"):
        kept = cumem.keep(make(1000, 1))
        place = kept.data_ptr()
        del kept
        tensor = make(1000, 2)
    assert tensor.data_ptr() == place
    cumem.sleep()
    cumem.wake_up(fill="zero")
    assert is_filled(tensor, 0)


def test_tensors_outside_of_pools_need_no_keeping(driver: DriverUnderTest) -> None:
    outside = torch.arange(10, device=driver.device)
    assert cumem.keep([outside, torch.empty(0)])[0] is outside
    with cumem.use_memory_pool("weights"):
        tensor = make(10)
    cumem.sleep(level=2)
    cumem.wake_up()
    assert outside.tolist() == list(range(10))
    del tensor


def test_a_module_reloads_after_level_2_around_what_it_keeps() -> None:
    with cumem.use_memory_pool("weights"), torch.device(cumem.default_device()):
        model = torch.nn.Sequential(torch.nn.Linear(16, 16), torch.nn.BatchNorm1d(16))
        model.register_buffer("rope", torch.arange(16.0).sin(), persistent=False)
    checkpoint = {name: tensor.cpu().clone() for name, tensor in model.state_dict().items()}
    rope = model.rope.cpu().clone()
    cumem.keep(model.rope)
    cumem.sleep(level=2)
    cumem.wake_up(fill="poison")
    model.load_state_dict(checkpoint)
    assert torch.equal(model.rope.cpu(), rope)
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor.cpu(), checkpoint[name])


# Undefined contents


@pytest.mark.parametrize(("fill", "value"), [("zero", 0x00), ("poison", 0xFF)])
def test_a_fill_covers_discarded_memory_and_nothing_else(fill: str, value: int) -> None:
    tensors = build(on_sleep=None)
    cumem.sleep()
    report = cumem.wake_up(fill=fill)
    assert report.undefined == {"kv_cache"}
    assert is_filled(tensors["kv_cache"], value)
    assert intact(tensors, ["weights", "draft"])


def test_poison_is_not_a_number_in_floating_point() -> None:
    with cumem.use_memory_pool("kv_cache"):
        tensors = [
            torch.ones(100, dtype=dtype, device=cumem.default_device())
            for dtype in (torch.float16, torch.bfloat16, torch.float32, torch.float64)
        ]
    cumem.sleep()
    cumem.wake_up(fill="poison")
    assert all(tensor.isnan().all() for tensor in tensors)


@pytest.mark.needs("pattern in fresh memory")
def test_discarded_contents_are_gone() -> None:
    with cumem.use_memory_pool("kv_cache"):
        tensor = make(4096, 1)
    cumem.sleep()
    cumem.wake_up()
    assert not holds_pattern(tensor, 1)


def test_the_epoch_moves_only_when_contents_are_discarded() -> None:
    tensors = build(on_sleep=None)
    before = {tag: cumem.epoch(tag) for tag in TAGS}

    def moved() -> set[str]:
        return {tag for tag in TAGS if cumem.epoch(tag) != before[tag]}

    cumem.sleep(tags=["weights"])
    cumem.wake_up()
    assert moved() == set()
    cumem.sleep()
    assert moved() == {"kv_cache"}
    cumem.sleep(level=2)
    cumem.wake_up()
    assert moved() == {"kv_cache"}
    assert cumem.epoch("kv_cache") == before["kv_cache"] + 1
    cumem.sleep(level=2)
    assert moved() == set(TAGS)
    cumem.wake_up(fill="zero")
    assert cumem.epoch("kv_cache") == before["kv_cache"] + 2
    assert tag_stats("weights").epoch == cumem.epoch("weights")
    del tensors


def test_a_tag_is_undefined_once_for_each_discard() -> None:
    tensors = build(on_sleep=None)
    cumem.sleep()
    assert cumem.wake_up().undefined == {"kv_cache"}
    cumem.sleep(offload_tags=TAGS)
    assert cumem.wake_up().undefined == frozenset()
    del tensors


def test_contents_that_died_asleep_leave_nothing_undefined() -> None:
    with cumem.use_memory_pool("kv_cache"):
        lost = make(4096)
    cumem.sleep()
    del lost
    cumem.trim()
    assert not cumem.is_sleeping()
    with cumem.use_memory_pool("kv_cache"):
        fresh = make(4096, 2)
    cumem.sleep(offload_tags=["kv_cache"])
    assert cumem.wake_up().undefined == frozenset()
    assert holds_pattern(fresh, 2)


def test_a_tag_with_only_free_blocks_loses_nothing() -> None:
    with cumem.use_memory_pool("kv_cache"):
        gone = make(4096)
        cumem.configure(cumem.Options(warn_empty_scope=False))
        del gone
    before = cumem.epoch("kv_cache")
    report = cumem.sleep()
    assert (report.freed_bytes, report.discarded_bytes) == (GRANULE, 0)
    assert cumem.wake_up().undefined == frozenset()
    assert cumem.epoch("kv_cache") == before


# Reports


def test_a_sleep_report_adds_up(driver: DriverUnderTest) -> None:
    tensors = build(on_sleep=None)
    with cumem.use_memory_pool("weights"):
        kept = cumem.keep(make(512, 5))
    segments = {tag: tag_stats(tag).segment_bytes for tag in TAGS}
    live = {tag: tag_stats(tag).live_bytes for tag in TAGS}
    before = driver.used_bytes()
    report = cumem.sleep(tags=["weights", "kv_cache"])
    assert report.freed_bytes == segments["weights"] + segments["kv_cache"]
    assert before - driver.used_bytes() == report.freed_bytes
    assert report.offloaded_bytes + report.discarded_bytes == live["weights"] + live["kv_cache"]
    assert report.offloaded_bytes == live["weights"]
    assert report.copied_bytes + report.skipped_bytes == report.offloaded_bytes
    assert report.host_bytes == cumem.stats().host_bytes >= report.offloaded_bytes
    assert (report.tags, report.devices) == ({"weights", "kv_cache"}, (0,))
    assert 0 < sum(report.phases.values()) <= report.seconds
    del tensors, kept


def test_a_wake_report_adds_up() -> None:
    tensors = build(on_sleep=None)
    slept = cumem.sleep()
    report = cumem.wake_up(["weights", "kv_cache"])
    assert report.mapped_bytes == sum(
        tag_stats(tag).segment_bytes for tag in ("weights", "kv_cache")
    )
    assert report.restored_bytes == tag_stats("weights").live_bytes
    rest = cumem.wake_up()
    assert report.mapped_bytes + rest.mapped_bytes == slept.freed_bytes
    assert report.restored_bytes + rest.restored_bytes == slept.offloaded_bytes
    assert (report.tags, report.devices) == ({"weights", "kv_cache"}, (0,))
    assert 0 < sum(report.phases.values()) <= report.seconds
    del tensors


def test_reports_print_as_one_line_that_names_the_tags() -> None:
    tensors = build(on_sleep=None)
    for report in (cumem.sleep(), cumem.wake_up(), cumem.sleep(tags=[]), cumem.wake_up([])):
        assert "\n" not in str(report)
        assert all(tag in str(report) for tag in report.tags)
    del tensors


def test_a_wake_says_in_words_what_is_undefined() -> None:
    tensors = build(on_sleep=None)
    cumem.sleep()
    assert "undefined: kv_cache" in str(cumem.wake_up())
    assert "undefined" not in str(cumem.wake_up())
    del tensors
