"""Do the buffers of a plan lie where it says, sleep as it says, and betray a wrong use?"""

from __future__ import annotations

import pytest
import torch
from support import GRANULE, MIB, DriverUnderTest, fill_pattern, holds_pattern, tag_stats

import cumem
from cumem import _owned


@pytest.fixture(autouse=True)
def warm(driver: DriverUnderTest) -> None:
    """What a device takes once, for streams and kernels, is there before anything is counted."""
    _owned.allocate(1, tag="warm")


def three() -> cumem.BufferPlan:
    plan = cumem.BufferPlan()
    plan.add("first", (512, 1024), torch.float32, first=0, last=1)
    plan.add("second", (512, 1024), torch.float32, first=2, last=3)
    plan.add("always", (7,), torch.int32, first=0, last=3)
    return plan


def test_buffers_are_one_exact_segment_of_the_workspace(driver: DriverUnderTest) -> None:
    plan, before = three(), driver.used_bytes()
    buffers = plan.allocate()
    assert driver.used_bytes() - before == 2 * GRANULE == -(-plan.bytes // GRANULE) * GRANULE
    stats = tag_stats("workspace")
    assert (stats.segments, stats.live_bytes) == (1, plan.bytes)
    assert {name: (tensor.shape, tensor.dtype) for name, tensor in buffers.items()} == {
        buffer.name: (torch.Size(buffer.shape), buffer.dtype) for buffer in plan.buffers
    }
    assert buffers["first"].data_ptr() == buffers["second"].data_ptr()
    for tensor in buffers.values():
        assert cumem.tag_of(tensor) == "workspace"
        assert tensor.data_ptr() % 512 == 0


def test_live_buffers_do_not_disturb_each_other() -> None:
    buffers = three().allocate()
    fill_pattern(buffers["always"], 1)
    fill_pattern(buffers["first"], 2)
    assert holds_pattern(buffers["always"], 1)
    fill_pattern(buffers["second"], 3)
    assert holds_pattern(buffers["always"], 1)
    assert holds_pattern(buffers["second"], 3)


def test_without_sharing_every_buffer_has_its_own_memory() -> None:
    plan = three()
    buffers = plan.allocate(share=False)
    assert buffers.bytes == plan.unshared_bytes
    for seed, tensor in enumerate(buffers.values()):
        fill_pattern(tensor, seed)
    assert all(holds_pattern(tensor, seed) for seed, tensor in enumerate(buffers.values()))


def test_the_workspace_is_discarded_by_default_and_keeps_its_addresses() -> None:
    buffers = three().allocate()
    addresses = [tensor.data_ptr() for tensor in buffers.values()]
    epoch = cumem.epoch("workspace")
    report = cumem.sleep()
    assert (report.offloaded_bytes, report.discarded_bytes) == (0, buffers.bytes)
    assert cumem.wake_up().undefined == {"workspace"}
    assert cumem.epoch("workspace") == epoch + 1
    assert [tensor.data_ptr() for tensor in buffers.values()] == addresses
    fill_pattern(buffers["first"], 5)
    assert holds_pattern(buffers["first"], 5)


def test_a_scope_of_the_tag_workspace_is_discarded_too() -> None:
    with cumem.use_memory_pool("workspace") as pool:
        tensor = torch.ones(100, device=cumem.default_device())
    assert pool.on_sleep is cumem.OnSleep.DISCARD
    del tensor


def test_another_policy_brings_the_contents_back() -> None:
    buffers = three().allocate(on_sleep="offload", tag="scratch")
    fill_pattern(buffers["first"], 5)
    cumem.sleep()
    cumem.wake_up()
    assert holds_pattern(buffers["first"], 5)


# Debug mode


def poisoned(tensor: torch.Tensor) -> bool:
    return bool((tensor.view(-1).view(torch.uint8) == 0xFF).all())


def test_a_buffer_read_outside_of_its_lifetime_holds_poison() -> None:
    buffers = three().allocate(debug=True)
    assert poisoned(buffers["first"])
    buffers.step(0)
    buffers["first"].fill_(1.5)
    buffers["always"].fill_(4)
    buffers.step(1)
    assert bool((buffers["first"] == 1.5).all())
    buffers.step(2)
    assert bool(buffers["first"].isnan().all())
    assert bool((buffers["always"] == 4).all())
    buffers["second"].fill_(2.5)
    buffers.step(4)
    assert all(poisoned(tensor) for tensor in buffers.values())


def test_a_write_outside_of_a_lifetime_is_named_at_the_next_step() -> None:
    buffers = three().allocate(debug=True)
    buffers.step(0)
    buffers["second"][3, 7] = 1.0
    with pytest.raises(cumem.CumemError, match=r"step\(1\): .* at step 0: 'second'"):
        buffers.step(1)
    assert poisoned(buffers["second"])
    buffers.step(2)


def test_a_discarding_sleep_is_not_taken_for_a_write() -> None:
    buffers = three().allocate(debug=True)
    buffers.step(0)
    cumem.sleep()
    cumem.wake_up(fill="zero")
    buffers.step(1)
    assert poisoned(buffers["second"])
    buffers["second"].fill_(0)
    with pytest.raises(cumem.CumemError, match="'second'"):
        buffers.step(1)


def test_without_debug_a_step_does_nothing() -> None:
    buffers = three().allocate()
    fill_pattern(buffers["first"], 5)
    buffers.step(3)
    assert holds_pattern(buffers["first"], 5)
    with pytest.raises(TypeError, match="a step must be an int"):
        buffers.step("one")


def test_an_asleep_workspace_cannot_be_stepped() -> None:
    buffers = three().allocate(debug=True)
    cumem.sleep()
    with pytest.raises(cumem.AsleepError, match="workspace"):
        buffers.step(0)
    cumem.wake_up()


# Errors


def test_an_empty_plan_allocates_nothing() -> None:
    with pytest.raises(ValueError, match="no buffers"):
        cumem.BufferPlan().allocate()
    assert cumem.stats().segment_bytes == 0


def test_too_large_a_plan_allocates_nothing(driver: DriverUnderTest) -> None:
    plan = cumem.BufferPlan()
    plan.add("huge", driver.free_bytes() + 64 * MIB, first=0, last=0)
    with pytest.raises(cumem.DeviceOutOfMemoryError):
        plan.allocate()
    assert cumem.stats().physical_bytes == 0


def test_a_plan_beyond_any_address_allocates_nothing() -> None:
    plan = cumem.BufferPlan()
    plan.add("bytes of bytes", 2**70, first=0, last=0)
    with pytest.raises(ValueError, match="addresses for so many"):
        plan.allocate()
    assert cumem.stats().physical_bytes == 0
