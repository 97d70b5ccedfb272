"""Is what cumem says of tensors and modules true?"""

from __future__ import annotations

import pytest
import torch
from support import (
    GRANULE,
    MIB,
    DriverUnderTest,
    in_thread,
    make,
    make_as,
    tag_stats,
)

import cumem


class Net(torch.nn.Module):
    """A parameter, a buffer, a tied weight, and tensors that a module does not know."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(100, 10))
        self.tied = self.weight
        self.register_buffer("scale", torch.ones(3))
        self.register_buffer("rope", torch.ones(5), persistent=False)
        self.register_buffer("nothing", torch.empty(0))
        self.plain = torch.ones(700)
        self.table = [torch.ones(11), torch.ones(12)]
        self.flat = self.weight.detach().view(-1)


def build(tag: str = "weights") -> Net:
    with cumem.use_memory_pool(tag), torch.device(cumem.default_device()):
        return Net()


# tag_of and is_mapped


def test_views_belong_to_the_pool_of_their_base(driver: DriverUnderTest) -> None:
    with cumem.use_memory_pool("weights"):
        base = make_as(torch.float32, (64, 64))
    views = [base[5:9], base.t(), base.view(-1)[100:], base[63, 63], base.detach()]
    assert {cumem.tag_of(view) for view in views} == {"weights"}
    assert all(cumem.is_mapped(view) for view in views)
    cumem.sleep()
    assert {cumem.tag_of(view) for view in views} == {"weights"}
    assert not any(cumem.is_mapped(view) for view in views)
    cumem.wake_up()
    assert all(cumem.is_mapped(view) for view in views)


@pytest.mark.parametrize(
    "foreign",
    [
        lambda: torch.ones(10),
        lambda: torch.empty(0),
        lambda: torch.empty(3, device="meta"),
        lambda: torch.eye(3).to_sparse(),
    ],
    ids=["host", "zero-size", "meta", "sparse"],
)
def test_a_foreign_tensor_is_in_no_pool_and_always_mapped(foreign: object) -> None:
    with cumem.use_memory_pool("weights"):
        own = make(10)
    tensor = foreign()
    cumem.sleep()
    assert cumem.tag_of(tensor) is None
    assert cumem.is_mapped(tensor)
    cumem.wake_up()
    del own


def test_a_tensor_of_the_device_outside_of_pools_is_foreign(driver: DriverUnderTest) -> None:
    with cumem.use_memory_pool("weights"):
        own = make(10)
    outside = torch.ones(10, device=driver.device)
    cumem.sleep()
    assert (cumem.tag_of(outside), cumem.is_mapped(outside)) == (None, True)
    cumem.wake_up()
    del own


def test_is_mapped_may_be_asked_from_any_thread_during_a_sleep() -> None:
    with cumem.use_memory_pool("weights"):
        tensor = make(20 * MIB)

    def ask() -> set[bool]:
        return {cumem.is_mapped(tensor) for _ in range(2000)}

    for _ in range(3):
        cumem.sleep()
        assert in_thread(ask) == {False}
        cumem.wake_up()
        assert in_thread(ask) == {True}


def test_sleeping_tags_are_exact() -> None:
    with cumem.use_memory_pool("weights"):
        tensor = make(10)
    assert (cumem.is_sleeping(), cumem.sleeping_tags()) == (False, frozenset())
    cumem.sleep()
    assert (cumem.is_sleeping(), cumem.sleeping_tags()) == (True, frozenset({"weights"}))
    assert isinstance(cumem.sleeping_tags(), frozenset)
    cumem.wake_up()
    assert (cumem.is_sleeping(), cumem.sleeping_tags()) == (False, frozenset())
    del tensor


# covered and uncovered


def test_a_module_built_in_a_scope_is_covered() -> None:
    model = build()
    assert cumem.covered(model, "weights") == []
    assert cumem.covered(model) == []


def test_what_lies_outside_is_named(driver: DriverUnderTest) -> None:
    model = build()
    model.late = torch.nn.Parameter(torch.ones(3, device=driver.device))
    model.register_buffer("index", torch.ones(3, device=driver.device))
    with cumem.use_memory_pool("other"):
        model.adapter = torch.nn.Parameter(torch.ones(3, device=driver.device))
    assert sorted(cumem.covered(model, "weights")) == ["adapter", "index", "late"]
    assert cumem.covered(model, "other") == ["weight", "late", "scale", "rope", "index"]


def test_a_module_on_meta_is_not_covered() -> None:
    model = build()
    with torch.device("meta"):
        unborn = torch.nn.Linear(3, 3)
    assert cumem.covered(unborn) == ["weight", "bias"]
    del model


def test_coverage_is_the_same_asleep() -> None:
    model = build()
    cumem.sleep()
    assert cumem.covered(model) == []
    assert {block.bytes for block in cumem.uncovered(model)} == {3072, 512}
    cumem.wake_up()


def test_uncovered_lists_what_no_parameter_or_buffer_holds() -> None:
    model = build()
    blocks = cumem.uncovered(model, "weights")
    held = {id(tensor) for block in blocks for tensor in block.tensors}
    assert held == {id(tensor) for tensor in (model.plain, *model.table)}
    assert sorted(block.bytes for block in blocks) == [512, 512, 3072]
    assert {block.address for block in blocks} == {
        tensor.data_ptr() for tensor in (model.plain, *model.table)
    }
    del blocks


def test_an_object_whose_class_has_no_hash_is_passed_over() -> None:
    class Unhashable(type):
        def __eq__(cls, other: object) -> bool:
            return cls is other

    class Strange(metaclass=Unhashable):
        pass

    strange, model = Strange(), build()
    (holder,) = cumem.uncovered(model)[0].tensors
    assert any(holder is tensor for tensor in (model.plain, *model.table))
    del strange


def test_a_plain_alias_of_a_parameter_is_covered() -> None:
    model = build()
    aliases = {model.flat.data_ptr(), model.weight.data_ptr()}
    assert aliases.isdisjoint(block.address for block in cumem.uncovered(model))


def test_a_bare_module_leaves_everything_uncovered() -> None:
    model = build()
    blocks = cumem.uncovered(torch.nn.Module())
    assert sum(block.bytes for block in blocks) == tag_stats("weights").live_bytes
    del model, blocks


def test_a_covered_module_has_nothing_uncovered() -> None:
    with cumem.use_memory_pool("weights"), torch.device(cumem.default_device()):
        model = torch.nn.Linear(10, 10)
    assert cumem.uncovered(model) == []


# stats and check


def test_the_stats_add_up(driver: DriverUnderTest) -> None:
    with cumem.use_memory_pool("weights"):
        weights = make(30 * MIB)
    with cumem.use_memory_pool("kv_cache"):
        kv = make(5000)
    for call in (
        lambda: None,
        lambda: cumem.sleep(tags=["weights"]),
        cumem.sleep,
        lambda: cumem.wake_up(["kv_cache"]),
        cumem.wake_up,
    ):
        call()
        cumem.check()
        stats = cumem.stats()
        for tag in stats.tags:
            assert tag.mapped_bytes + tag.asleep_bytes == tag.segment_bytes
            assert tag.live_bytes <= tag.segment_bytes
        assert stats.mapped_bytes + stats.asleep_bytes == stats.segment_bytes == 32 * MIB
        assert stats.physical_bytes == stats.mapped_bytes
        assert stats.handles_created - stats.handles_released == (
            (1 if cumem.is_mapped(weights) else 0) + (1 if cumem.is_mapped(kv) else 0)
        )
        assert stats.reserved_addresses == stats.segment_bytes
        assert stats.host_used_bytes == sum(tag.backup_bytes for tag in stats.tags)
        assert stats.host_used_bytes <= stats.host_bytes
        (device,) = stats.devices
        assert device.mapped_bytes == stats.mapped_bytes
        assert device.used_bytes == driver.used_bytes()
        assert device.reserved_bytes >= stats.segment_bytes
        assert device.used_bytes <= device.total_bytes


def test_tags_of_the_stats_are_in_order() -> None:
    tensors = []
    for tag in ("zebra", "ant", "mole"):
        with cumem.use_memory_pool(tag):
            tensors.append(make(10))
    tags = [entry.tag for entry in cumem.stats().tags]
    assert tags == sorted(tags)
    assert {"zebra", "ant", "mole"} <= set(tags)


def test_the_text_of_the_stats_is_the_same_for_the_same_state() -> None:
    with cumem.use_memory_pool("weights"):
        tensor = make(5000)
    first = str(cumem.stats())
    assert str(cumem.stats()) == first
    cumem.sleep()
    asleep = str(cumem.stats())
    assert asleep != first
    cumem.wake_up()
    cumem.sleep()
    assert str(cumem.stats()) == asleep
    assert "weights: 1 segment(s), 2.0 MiB: 0 B mapped, 2.0 MiB asleep, 5.0 KiB live" in asleep
    del tensor


def test_a_known_tag_without_memory_stays_in_the_stats_with_its_epoch() -> None:
    with cumem.use_memory_pool("kv_cache"):
        tensor = make(100)
    cumem.sleep()
    del tensor
    cumem.trim()
    entry = tag_stats("kv_cache")
    assert (entry.segments, entry.segment_bytes) == (0, 0)
    assert entry.epoch == cumem.epoch("kv_cache") > 0


@pytest.mark.needs("way to unmap behind cumem's back")
def test_check_finds_a_disagreement_with_the_driver(driver: DriverUnderTest) -> None:
    with cumem.use_memory_pool("weights"):
        tensor = make(100)
    driver.emulator.fail("cuMemGetAccess", code="CUDA_ERROR_INVALID_VALUE")
    with pytest.raises(cumem.CumemError, match="check"):
        cumem.check()
    cumem.check()
    assert tag_stats("weights").segment_bytes == GRANULE
    del tensor
