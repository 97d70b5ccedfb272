"""Does what vLLM's sleep mode relies on hold for the drop-in of its allocator?"""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterator

import pytest
import torch
from support import MIB, DriverUnderTest, holds_pattern, make, raw, same_bytes

import cumem
from cumem.compat.vllm import CuMemAllocator, TaggedMemory


@pytest.fixture
def allocator() -> Iterator[CuMemAllocator]:
    yield CuMemAllocator()
    CuMemAllocator.instance = None


def poison_left(tensor: torch.Tensor) -> bool:
    return same_bytes(tensor, torch.full((tensor.numel(),), 0xFF, dtype=torch.uint8))


def mapped(tensors: dict[str, torch.Tensor]) -> set[str]:
    return {tag for tag, tensor in tensors.items() if cumem.is_mapped(tensor)}


def make_each(allocator: CuMemAllocator, *tags: str) -> dict[str, torch.Tensor]:
    tensors = {}
    for seed, tag in enumerate(tags):
        with allocator.use_memory_pool(tag):
            tensors[tag] = make(2 * MIB, seed)
    return tensors


def test_there_is_one_instance() -> None:
    first = CuMemAllocator.get_instance()
    assert CuMemAllocator.get_instance() is first is CuMemAllocator.instance
    CuMemAllocator.instance = None


def test_pooled_and_plain_memory_work_together(
    allocator: CuMemAllocator, driver: DriverUnderTest
) -> None:
    plain = torch.zeros(1024, 1024, device=driver.device)
    with allocator.use_memory_pool():
        one = torch.ones(1024, 1024, device=driver.device)
        two = torch.full((1024, 1024), 2.0, device=driver.device)
    assert bool((plain + one + two == 3).all())
    used = driver.used_bytes()
    allocator.sleep()
    assert used - driver.used_bytes() >= 8 * MIB
    allocator.wake_up()
    assert bool((plain + one + two == 3).all())


def test_a_wake_without_memory_is_an_error_that_loses_nothing(
    allocator: CuMemAllocator, driver: DriverUnderTest
) -> None:
    with allocator.use_memory_pool():
        tensor = make(80 * MIB, 1)
    allocator.sleep()
    with driver.another_tenant(leaves=40 * MIB), pytest.raises(RuntimeError, match="wake_up"):
        allocator.wake_up()
    allocator.wake_up()
    assert holds_pattern(tensor, 1)


def test_sleep_backs_up_the_named_tags_and_discards_the_others(allocator: CuMemAllocator) -> None:
    tensors = make_each(allocator, "weights", "kv_cache", "default")
    report = allocator.sleep(offload_tags=("weights",))
    assert mapped(tensors) == set()
    assert (report.offloaded_bytes, report.discarded_bytes) == (2 * MIB, 4 * MIB)
    cumem.wake_up(fill="poison")
    assert holds_pattern(tensors["weights"], 0)
    assert poison_left(tensors["kv_cache"])
    assert poison_left(tensors["default"])


@pytest.mark.parametrize("offload", [None, "default", ("default",), ("default", "nobody")])
def test_a_sleep_without_arguments_backs_the_default_tag_up(
    allocator: CuMemAllocator, offload: tuple[str, ...] | str | None
) -> None:
    tensors = make_each(allocator, "default", "weights")
    allocator.sleep(offload)
    cumem.wake_up(fill="poison")
    assert holds_pattern(tensors["default"], 0)
    assert poison_left(tensors["weights"])


def test_an_empty_tuple_discards_everything(allocator: CuMemAllocator) -> None:
    tensors = make_each(allocator, "weights", "kv_cache")
    assert allocator.sleep(offload_tags=()).offloaded_bytes == 0
    cumem.wake_up(fill="poison")
    assert all(poison_left(tensor) for tensor in tensors.values())


def test_discard_leaves_other_tags_usable(allocator: CuMemAllocator) -> None:
    tensors = make_each(allocator, "weights", "kv_cache")
    allocator.discard("kv_cache")
    allocator.discard(("kv_cache", "nobody"))
    assert mapped(tensors) == {"weights"}
    assert holds_pattern(tensors["weights"], 0)
    allocator.wake_up(tags=["kv_cache"])
    assert mapped(tensors) == {"weights", "kv_cache"}
    assert holds_pattern(tensors["weights"], 0)


def test_what_sleeps_keeps_how_it_went_to_sleep(
    allocator: CuMemAllocator, caplog: pytest.LogCaptureFixture
) -> None:
    tensors = make_each(allocator, "weights", "kv_cache")
    allocator.discard("kv_cache")
    with caplog.at_level(logging.WARNING, logger="cumem"):
        allocator.sleep(("weights", "kv_cache"))
        allocator.discard("weights")
    assert ["kv_cache" in caplog.messages[0], "weights" in caplog.messages[1]] == [True, True]
    cumem.wake_up(fill="poison")
    assert holds_pattern(tensors["weights"], 0)
    assert poison_left(tensors["kv_cache"])


def test_a_selective_wake_brings_everything_but_weights_and_cache(
    allocator: CuMemAllocator,
) -> None:
    tensors = make_each(allocator, "weights", "kv_cache", "workspace", "default")
    allocator.sleep(("weights",))
    allocator.wake_up(tags=["weights"])
    assert mapped(tensors) == {"weights", "workspace", "default"}
    assert holds_pattern(tensors["weights"], 0)
    allocator.wake_up(tags=["kv_cache"])
    assert mapped(tensors) == set(tensors)


def test_a_wake_of_unknown_tags_brings_the_internal_ones(allocator: CuMemAllocator) -> None:
    tensors = make_each(allocator, "weights", "workspace")
    allocator.sleep(("weights",))
    allocator.wake_up(["nobody"])
    assert mapped(tensors) == {"workspace"}
    allocator.wake_up(None)
    assert holds_pattern(tensors["weights"], 0)


def test_repeats_do_nothing(allocator: CuMemAllocator) -> None:
    allocator.sleep()
    allocator.wake_up()
    tensors = make_each(allocator, "weights")
    allocator.wake_up()
    allocator.sleep("weights")
    assert allocator.sleep("weights").freed_bytes == 0
    allocator.wake_up()
    assert allocator.wake_up().mapped_bytes == 0
    assert holds_pattern(tensors["weights"], 0)


def test_a_tag_can_be_entered_again(allocator: CuMemAllocator) -> None:
    with allocator.use_memory_pool("weights"):
        first = make(2 * MIB, 1)
    with allocator.reuse_memory_pool("weights"):
        second = make(2 * MIB, 2)
    with allocator.use_memory_pool("weights"):
        third = make(2 * MIB, 3)
    assert allocator.get_current_usage() >= 6 * MIB
    allocator.sleep("weights")
    assert not any(cumem.is_mapped(tensor) for tensor in (first, second, third))
    allocator.wake_up(["weights"])
    assert [holds_pattern(t, s) for s, t in enumerate((first, second, third), 1)] == [True] * 3
    with pytest.raises(ValueError, match="no memory pool of tag 'nobody'"):
        allocator.reuse_memory_pool("nobody")


def test_tags_nest_and_the_current_one_is_told(allocator: CuMemAllocator) -> None:
    assert allocator.current_tag == "default"
    with allocator.use_memory_pool("weights"):
        outer = make(MIB)
        with allocator.use_memory_pool("kv_cache"):
            assert allocator.current_tag == "kv_cache"
            inner = make(MIB)
        assert allocator.current_tag == "weights"
    assert allocator.current_tag == "default"
    assert (cumem.tag_of(outer), cumem.tag_of(inner)) == ("weights", "kv_cache")


def test_a_workspace_that_grew_is_the_same_memory_after_a_wake(allocator: CuMemAllocator) -> None:
    """A buffer that is dropped for a larger one in its tag, between sleeps."""
    with allocator.use_memory_pool("workspace"):
        workspace = make(2 * MIB, 1)
    with allocator.use_memory_pool("workspace"):
        workspace = make(30 * MIB, 2)
    where = workspace.data_ptr()
    allocator.sleep(())
    allocator.wake_up(["weights"])
    assert workspace.data_ptr() == where
    workspace.copy_(make(30 * MIB, 3))
    assert holds_pattern(workspace, 3)


def test_what_a_scope_made_and_dropped_goes_back_at_its_end(
    allocator: CuMemAllocator, driver: DriverUnderTest
) -> None:
    """Weights that are made in one type and kept in another."""
    with allocator.use_memory_pool("weights"):
        wide = [make(20 * MIB) for _ in range(3)]
        narrow = make(4 * MIB, 1)
        wide.clear()
    assert allocator.get_current_usage() < 40 * MIB
    allocator.sleep("weights")
    assert allocator.wake_up().mapped_bytes < 40 * MIB
    assert holds_pattern(narrow, 1)


def test_usage_counts_what_sleeps_and_nobody_elses(allocator: CuMemAllocator) -> None:
    assert allocator.get_current_usage() == 0
    with cumem.use_memory_pool("others"):
        other = make(2 * MIB)
    assert allocator.get_current_usage() == 0
    tensors = make_each(allocator, "weights")
    used = allocator.get_current_usage()
    assert used >= 2 * MIB
    allocator.sleep("weights")
    assert allocator.get_current_usage() == used
    assert cumem.is_mapped(other)
    tensors.clear()
    allocator.close()
    assert allocator.get_current_usage() == 0


def test_pools_are_released_when_nothing_uses_them(
    allocator: CuMemAllocator, driver: DriverUnderTest
) -> None:
    tensors = make_each(allocator, "weights", "kv_cache")
    allocator.release_pools()
    assert holds_pattern(tensors["weights"], 0)
    tensors.clear()
    allocator.release_pools()
    allocator.release_pools()
    assert allocator.get_current_usage() == 0


def test_host_memory_goes_back_when_it_is_not_to_be_kept(allocator: CuMemAllocator) -> None:
    tensors = make_each(allocator, "weights")
    for retain, held in ((True, 2 * MIB), (False, 0)):
        cumem.configure(cumem.Options(retain_backup=retain))
        allocator.sleep("weights")
        assert cumem.stats().host_bytes >= 2 * MIB
        allocator.wake_up()
        assert cumem.stats().host_bytes == held
    assert holds_pattern(tensors["weights"], 0)


def test_graph_memory_always_comes_back(allocator: CuMemAllocator) -> None:
    with allocator.cudagraph_pool() as pool:
        assert allocator.current_tag == CuMemAllocator.cudagraph_tag
        with pytest.raises(cumem.BusyError), allocator.cudagraph_pool():
            pass
    with allocator.use_cudagraph_pool() as again:
        assert again == pool
    allocator.release_cudagraph_pool()
    with allocator.cudagraph_pool() as fresh:
        assert fresh != pool


class Listener:
    """Remembers what hooks are told."""

    def __init__(self, fails: bool = False) -> None:
        self.heard: list[tuple[str, dict[str, bool]]] = []
        self.fails = fails

    def before_unmap(self, memory: Collection[TaggedMemory], tags: Collection[str]) -> None:
        self.heard.append((",".join(sorted(tags)), {m.tag: m.is_asleep for m in memory}))

    def after_map(self, memory: Collection[TaggedMemory]) -> None:
        self.heard.append(("map", {m.tag: m.is_asleep for m in memory}))


def test_hooks_hear_of_every_unmap_and_map(allocator: CuMemAllocator) -> None:
    tensors = make_each(allocator, "kv_cache", "weights")
    allocator.hooks = listener = Listener()
    allocator.discard("kv_cache")
    allocator.wake_up(["kv_cache"])
    assert listener.heard == [
        ("kv_cache", {"kv_cache": False, "weights": False}),
        ("map", {"kv_cache": False, "weights": False}),
    ]
    assert mapped(tensors) == {"kv_cache", "weights"}


def test_hooks_hear_that_a_failed_sleep_left_everything(allocator: CuMemAllocator) -> None:
    with allocator.use_memory_pool("weights"):
        tensor = make(2 * MIB, 1)
        allocator.hooks = listener = Listener()
        with pytest.raises(cumem.BusyError):
            allocator.sleep("weights")
    assert [word for word, _ in listener.heard] == ["weights", "map"]
    assert not raw(tensor).eq(0).all()
    assert holds_pattern(tensor, 1)
