"""Has memory of cumem's own the bytes and the tensors that were asked for, or nothing?"""

from __future__ import annotations

import gc

import pytest
import torch
from owned_support import owned
from support import GRANULE, MIB, DriverUnderTest, fill_pattern, holds_pattern, make, tag_stats
from test_contents import DTYPES

import cumem
from cumem import _owned


@pytest.mark.parametrize("count", [1, 513, GRANULE - 1, GRANULE, GRANULE + 1, 5 * MIB + 7])
def test_a_segment_has_the_bytes_that_were_asked_for_and_little_more(
    driver: DriverUnderTest, count: int
) -> None:
    before = driver.used_bytes()
    tensor = owned(count, seed=count)
    stats = tag_stats("weights")
    assert (stats.segments, stats.live_bytes) == (1, count)
    assert count <= stats.segment_bytes < count + GRANULE
    assert driver.used_bytes() - before == stats.segment_bytes
    assert cumem.tag_of(tensor) == "weights"
    assert holds_pattern(tensor, count)


@pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental")
@pytest.mark.parametrize("dtype", DTYPES, ids=lambda dtype: str(dtype).removeprefix("torch."))
def test_every_dtype_is_shown_where_it_was_put(dtype: torch.dtype) -> None:
    segment = _owned.allocate(4096, tag="weights")
    tensor = segment.tensor(dtype, (3, 5), offset=16)
    scalar = segment.tensor(dtype, (), offset=2048)
    fill_pattern(tensor, 1)
    fill_pattern(scalar, 2)
    assert (tensor.dtype, tuple(tensor.shape), tensor.stride()) == (dtype, (3, 5), (5, 1))
    assert tensor.data_ptr() == segment.address + 16
    assert tensor.device.type == segment.device.type
    assert tensor.untyped_storage().nbytes() == 15 * dtype.itemsize
    cumem.sleep()
    cumem.wake_up()
    assert holds_pattern(tensor, 1)
    assert holds_pattern(scalar, 2)


def test_two_tensors_of_a_segment_may_overlap_and_show_the_same_bytes() -> None:
    segment = _owned.allocate(1000, tag="weights")
    whole = segment.tensor(torch.uint8, (1000,))
    part = segment.tensor(torch.uint8, (10,), offset=500)
    fill_pattern(whole, 4)
    assert torch.equal(part.cpu(), whole[500:510].cpu())


def test_a_tensor_without_bytes_needs_no_memory() -> None:
    segment = _owned.allocate(1, tag="weights")
    assert segment.tensor(torch.float32, (0, 7)).shape == (0, 7)


@pytest.mark.parametrize(
    ("shape", "offset"), [((101,), 0), ((100,), 1), ((1,), 100), ((1,), -1), ((-1,), 0)]
)
def test_a_tensor_outside_the_segment_is_refused(shape: tuple[int, ...], offset: int) -> None:
    segment = _owned.allocate(100, tag="weights")
    with pytest.raises(ValueError, match="not inside"):
        segment.tensor(torch.uint8, shape, offset)


def test_a_tensor_that_is_not_aligned_is_refused() -> None:
    segment = _owned.allocate(100, tag="weights")
    with pytest.raises(ValueError, match="not aligned"):
        segment.tensor(torch.float32, (2,), offset=2)


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        ({"bytes": 0, "tag": "weights"}, ValueError),
        ({"bytes": True, "tag": "weights"}, TypeError),
        ({"bytes": 1, "tag": ""}, ValueError),
        ({"bytes": 1, "tag": 3}, TypeError),
        ({"bytes": 1, "tag": "weights", "on_sleep": "nap"}, ValueError),
        ({"bytes": 1, "tag": "weights", "device": 99}, ValueError),
    ],
)
def test_bad_arguments_leave_nothing(
    driver: DriverUnderTest, arguments: dict[str, object], error: type[Exception]
) -> None:
    before = driver.used_bytes()
    with pytest.raises(error):
        _owned.allocate(**arguments)  # type: ignore[arg-type]
    assert driver.used_bytes() == before


def test_a_module_over_it_is_covered() -> None:
    linear = torch.nn.Linear(8, 8, device=cumem.default_device())
    segment = _owned.allocate(4096, tag="weights")
    linear.weight.data = segment.tensor(torch.float32, (8, 8))
    assert cumem.covered(linear) == ["bias"]
    linear.bias.data = segment.tensor(torch.float32, (8,), offset=1024)
    assert cumem.covered(linear) == []
    assert cumem.uncovered(linear) == []
    other = owned(10)
    (block,) = cumem.uncovered(linear)
    assert (block.address, block.bytes) == (other.data_ptr(), 10)
    assert any(tensor is other for tensor in block.tensors)


def test_a_scope_that_is_open_does_not_take_its_tensors() -> None:
    with cumem.use_memory_pool("scope"):
        tensor, other = owned(100), make(1)
    assert (cumem.tag_of(tensor), cumem.tag_of(other)) == ("weights", "scope")


def test_a_copy_of_one_tensor_holds_no_more_than_that() -> None:
    segment = _owned.allocate(MIB, tag="weights")
    tensor = segment.tensor(torch.float32, (4, 4), offset=64)
    fill_pattern(tensor, 1)
    clone = torch.clone(tensor)
    assert clone.untyped_storage().nbytes() == 64
    assert tensor.untyped_storage().nbytes() == 64
    assert not tensor._is_view()


@pytest.mark.machine(capacity_bytes=32 * MIB)
@pytest.mark.needs("a small device")
def test_a_full_device_is_told_and_caches_are_cleared_first(driver: DriverUnderTest) -> None:
    first = owned(20 * MIB)
    with pytest.raises(cumem.DeviceOutOfMemoryError, match=r"12\.0 MiB free"):
        owned(20 * MIB)
    assert holds_pattern(first)
    del first
    gc.collect()
    with cumem.use_memory_pool("other"):
        cached = make(20 * MIB)
    del cached
    cumem.trim("other")
    assert holds_pattern(owned(20 * MIB))


@pytest.mark.parametrize(
    "call", ["cuMemAddressReserve", "cuMemCreate", "cuMemMap", "cuMemSetAccess"]
)
@pytest.mark.needs("failures on request")
def test_a_refusal_leaves_nothing(driver: DriverUnderTest, call: str) -> None:
    owned(1)
    gc.collect()
    driver.emulator.fail(call, code="CUDA_ERROR_UNKNOWN")
    with pytest.raises(cumem.DriverError, match=f"{call}.*Nothing was allocated"):
        owned(MIB)
    assert driver.used_bytes() == 0
    assert holds_pattern(owned(MIB))
