"""Which contents survive a sleep, which are undefined after it, and do reports say so?"""

from __future__ import annotations

import pytest
import torch
from support import GRANULE, MIB, DriverUnderTest, holds_pattern, make, tag_stats
from tags_support import TAGS, build, intact, is_filled

import cumem

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
    within_copy = report.phases["touch"] + report.phases["pin"]
    assert 0 < sum(report.phases.values()) - within_copy <= report.seconds
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
