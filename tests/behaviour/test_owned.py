"""Does memory of cumem's own live, sleep and wake as torch's segments do?"""

from __future__ import annotations

import gc
import threading
import weakref

import pytest
import torch
from support import (
    GRANULE,
    MIB,
    DriverUnderTest,
    fill_pattern,
    holds_pattern,
    in_thread,
    make,
    run_fresh,
    tag_stats,
)
from test_contents import DTYPES

import cumem
from cumem import _owned, _runtime


def owned(count: int, seed: int = 0, **settings: object) -> torch.Tensor:
    """One tensor of ``count`` bytes with its pattern, in a segment of its own."""
    segment = _owned.allocate(count, **{"tag": "weights", **settings})  # type: ignore[arg-type]
    tensor = segment.tensor(torch.uint8, (count,))
    fill_pattern(tensor, seed)
    return tensor


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


def test_memory_goes_when_the_last_tensor_over_it_dies(driver: DriverUnderTest) -> None:
    before = driver.used_bytes()
    segment = _owned.allocate(4 * MIB, tag="weights")
    first = segment.tensor(torch.uint8, (MIB,))
    second = segment.tensor(torch.uint8, (MIB,), offset=MIB)
    part = second[10:20]
    del segment, first, second
    gc.collect()
    assert driver.used_bytes() - before == 4 * MIB
    del part
    gc.collect()
    assert driver.used_bytes() == before


def test_memory_that_is_asleep_can_be_let_go(driver: DriverUnderTest) -> None:
    tensor = owned(3 * MIB)
    cumem.sleep()
    addresses = cumem.stats().reserved_addresses
    del tensor
    gc.collect()
    assert cumem.stats().reserved_addresses < addresses
    assert cumem.stats().host_used_bytes == 0
    assert cumem.sleeping_tags() == frozenset()


def test_memory_may_be_let_go_by_another_thread(driver: DriverUnderTest) -> None:
    before = driver.used_bytes()
    held = [owned(MIB)]
    in_thread(held.clear)
    gc.collect()
    assert driver.used_bytes() == before


def test_memory_may_be_let_go_while_an_error_is_on_its_way(driver: DriverUnderTest) -> None:
    before = driver.used_bytes()

    def fails() -> None:
        tensor = owned(MIB)
        raise KeyError(tensor.numel())

    with pytest.raises(KeyError, match=str(MIB)):
        fails()
    gc.collect()
    assert driver.used_bytes() == before


@pytest.mark.needs("slow work on request")
def test_memory_is_given_back_after_work_that_uses_it(driver: DriverUnderTest) -> None:
    tensor = owned(MIB)
    driver.emulator.enqueue(write=(tensor.data_ptr(), b"late"), delay=0.05)
    del tensor
    gc.collect()
    assert driver.emulator.ledger()["pending_work"] == 0
    assert driver.used_bytes() == 0


@pytest.mark.needs("captures on request")
def test_memory_let_go_during_a_capture_follows_when_it_ends(driver: DriverUnderTest) -> None:
    tensor = owned(MIB)
    driver.emulator.begin_capture()
    del tensor
    gc.collect()
    assert driver.used_bytes() == GRANULE
    driver.emulator.end_capture()
    other = owned(MIB)
    assert driver.used_bytes() == GRANULE
    assert holds_pattern(other)


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


_AT_EXIT = """
import torch, cumem
from cumem import _owned
segment = _owned.allocate(5000, tag="weights")
tensor = segment.tensor(torch.uint8, (5000,))
tensor.fill_(3)
{before}
module_level = [segment, tensor]
"""


@pytest.mark.parametrize("before", ["", "cumem.sleep()"], ids=["awake", "asleep"])
def test_a_process_ends_without_noise(before: str) -> None:
    run_fresh(_AT_EXIT.format(before=before))


def test_a_forked_child_leaves_it_to_its_parent() -> None:
    code = _AT_EXIT.format(before="") + (
        "import os, gc\n"
        "child = os.fork()\n"
        "if child == 0:\n"
        "    del segment, tensor, module_level\n"
        "    gc.collect()\n"
        "    try:\n"
        "        _owned.allocate(1, tag='weights')\n"
        "    except cumem.DriverError as error:\n"
        "        os._exit(0 if 'fork' in str(error) else 1)\n"
        "    os._exit(2)\n"
        "assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0\n"
        "assert (tensor == 3).all()\n"
        "assert cumem.stats().segment_bytes == 2 << 20\n"
    )
    run_fresh(code)


def test_memory_keeps_its_machine_until_it_is_let_go(driver: DriverUnderTest) -> None:
    if not driver.emulated:
        pytest.skip("the real driver is one")
    from cumem.testing import emulated_driver

    with emulated_driver() as other:
        tensor = owned(MIB)
        assert _runtime.current() is not None
    assert holds_pattern(tensor)
    assert other.used_bytes() == GRANULE
    alive = weakref.ref(tensor)
    del tensor
    gc.collect()
    assert alive() is None
    assert other.used_bytes() == 0
