"""Does the report say where every byte is, and what a sleep would lose?"""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from support import GRANULE, MIB, DriverUnderTest, make, make_as

import cumem
from cumem import _runtime, inspection


def only_tag(tag: str) -> cumem.TagReport:
    (device,) = cumem.report().devices
    (found,) = [entry for entry in device.tags if entry.tag == tag]
    return found


def test_report_adds_up_awake_and_asleep(driver: DriverUnderTest) -> None:
    with cumem.use_memory_pool("weights"):
        weights = [make(3 * MIB), make(700)]
    with cumem.use_memory_pool("kv_cache"):
        cache = make(32 * MIB)
    awake = cumem.report()
    (device,) = awake.devices
    assert device.used_bytes == device.mapped_bytes + device.torch_bytes + device.other_bytes
    assert device.mapped_bytes == sum(tag.segment_bytes for tag in device.tags)
    assert device.other_bytes >= 0
    assert only_tag("kv_cache").live_bytes == cache.nbytes
    assert only_tag("weights").live_bytes == 3 * MIB + 1024
    cumem.sleep()
    (asleep,) = cumem.report().devices
    assert asleep.mapped_bytes == 0
    assert asleep.torch_bytes == device.torch_bytes, "what sleeps is none of torch's own"
    for tag in asleep.tags:
        assert tag.mapped_bytes + tag.asleep_bytes == tag.segment_bytes
        assert tag.live_bytes + tag.hole_bytes == tag.segment_bytes
    assert only_tag("weights").backup_bytes == 3 * MIB + 1024
    assert cumem.report().host_used_bytes >= 3 * MIB + 1024
    cumem.wake_up()
    del weights


def test_what_others_take_is_told_apart(driver: DriverUnderTest) -> None:
    with cumem.use_memory_pool("weights"):
        tensor = make(20 * MIB)
    (before,) = cumem.report().devices
    taken = (driver.free_bytes() - 64 * MIB) // GRANULE * GRANULE
    with driver.another_tenant(leaves=64 * MIB):
        (after,) = cumem.report().devices
    more = after.other_bytes - before.other_bytes
    assert more == taken if driver.emulated else more >= taken
    assert after.torch_bytes == before.torch_bytes
    assert after.mapped_bytes == before.mapped_bytes == 20 * MIB
    del tensor


def test_the_ten_largest_blocks_are_named_with_what_holds_them() -> None:
    with cumem.use_memory_pool("weights"):
        tensors = [make_as(torch.float32, (size, 256)) for size in range(1, 15)]
    largest = only_tag("weights").largest
    assert [block.requested_bytes for block in largest] == [n * 1024 for n in range(14, 4, -1)]
    assert [block.address for block in largest] == [
        tensor.data_ptr() for tensor in reversed(tensors[4:])
    ]
    assert largest[0].tensors == ("float32[14, 256]",)
    assert largest[0].stack == ()


def test_report_leaves_what_other_threads_are_making_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with cumem.use_memory_pool("weights"):
        tensor = make(4096)
    begun, looking, made = threading.Event(), threading.Event(), []
    place = inspection._place

    def slowly() -> Iterator[int]:
        begun.set()
        assert looking.wait(60)
        yield from range(3)

    def wait_for_it(thing: torch.Tensor) -> tuple[int, int]:
        looking.set()
        maker.join(60)
        return place(thing)

    maker = threading.Thread(target=lambda: made.append(tuple(slowly())))
    maker.start()
    assert begun.wait(60)
    monkeypatch.setattr(inspection, "_place", wait_for_it)
    assert only_tag("weights").largest[0].tensors == (f"uint8[{tensor.numel()}]",)
    maker.join(60)
    assert made == [(0, 1, 2)]


class Rude(torch.Tensor):
    """A subclass that wants to be asked nothing."""

    @classmethod
    def __torch_function__(cls, *_: object, **__: object) -> Any:
        raise KeyError("rude")


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_tensors_of_any_kind_are_named() -> None:
    lazy = torch.nn.LazyLinear(3)  # its parameters raise ValueError
    with cumem.use_memory_pool("weights"):
        memory, rude = make(8000), make(4096).as_subclass(Rude)
    lengths, strides, starts = torch.tensor([[5000], [3000]]), torch.ones(2, 1), [0, 5000]
    nested = torch._nested_view_from_buffer(memory, lengths, strides.long(), torch.tensor(starts))
    held = [block.tensors for block in only_tag("weights").largest]
    assert ("uint8[4096]",) in held
    assert ("uint8[8000]", "uint8[nested]") in held
    assert cumem.covered(lazy) == []
    assert len(cumem.uncovered(lazy)) == len(held)
    assert (cumem.tag_of(rude), cumem.is_mapped(nested)) == ("weights", True)


def test_allocation_stacks_are_shown_where_torch_records_them(
    driver: DriverUnderTest, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not driver.emulated:
        torch.cuda.memory._record_memory_history("state", stacks="python")
    with cumem.use_memory_pool("weights"):
        tensor = make(3 * MIB)
    if driver.emulated:
        monkeypatch.setattr(_runtime.current(), "backend", _Recording(_runtime.current().backend))
    else:
        torch.cuda.memory._record_memory_history(enabled=None)
    (block,) = only_tag("weights").largest
    assert any("test_report.py" in frame and "make" in frame for frame in block.stack) or any(
        "support.py" in frame for frame in block.stack
    )
    assert block.stack[0] in str(cumem.report())
    del tensor


class _Recording:
    """The emulated backend, with the frames that torch adds where it records history."""

    def __init__(self, backend: Any) -> None:
        self._backend = backend

    def __getattr__(self, name: str) -> Any:
        return getattr(self._backend, name)

    def snapshot(self) -> list[dict[str, Any]]:
        frames = [{"filename": "tests/support.py", "line": 55, "name": "make_as"}]
        segments = self._backend.snapshot()
        for segment in segments:
            for block in segment["blocks"]:
                block["frames"] = frames if block["requested_size"] else []
        return segments


# What a sleep would lose


def test_a_small_table_among_cache_tensors_is_named_before_it_is_lost() -> None:
    with cumem.use_memory_pool("kv_cache"):
        cache = [make(8 * MIB) for _ in range(3)]
        table = make_as(torch.int32, (32, 32))
    tag = only_tag("kv_cache")
    assert [block.address for block in tag.intruders] == [table.data_ptr()]
    assert tag.intruders[0].tensors == ("int32[32, 32]",)
    text = str(cumem.report())
    assert "these 1 small block(s) of 4.0 KiB" in text
    assert "int32[32, 32]" in text
    del cache


@pytest.mark.parametrize("why", ["kept", "offload", "all small", "asleep"])
def test_what_is_not_lost_or_not_small_is_no_intruder(why: str) -> None:
    policy = "offload" if why == "offload" else "discard"
    with cumem.use_memory_pool("kv_cache", on_sleep=policy):
        cache = make(500 if why == "all small" else 8 * MIB)
        table = make(4096)
    if why == "kept":
        cumem.keep(table)
    if why == "asleep":
        cumem.sleep()
    assert only_tag("kv_cache").intruders == ()
    cumem.wake_up()
    del cache


def test_many_intruders_are_counted_and_some_named() -> None:
    with cumem.use_memory_pool("kv_cache"):
        cache = make(8 * MIB)
        tables = [make(512) for _ in range(25)]
    assert len(only_tag("kv_cache").intruders) == 25
    assert "and 15 more" in str(cumem.report())
    del cache, tables


# Forms


def test_json_has_all_of_it_and_is_the_same_text_each_time() -> None:
    with cumem.use_memory_pool("weights"):
        tensor = make(5 * MIB)
    report = cumem.report()
    read = json.loads(report.to_json())
    assert read == json.loads(json.dumps(report.as_dict()))
    assert read["devices"][0]["tags"][0]["live_bytes"] == 5 * MIB
    again = cumem.report()
    assert (again.devices[0].tags, str(again.devices[0].tags)) == (
        report.devices[0].tags,
        str(report.devices[0].tags),
    )
    del tensor


def test_report_changes_nothing() -> None:
    with cumem.use_memory_pool("weights"):
        tensor = make(5 * MIB)
    before = cumem.stats()
    cumem.report()
    assert cumem.stats().tags == before.tags
    assert cumem.stats().handles_created == before.handles_created
    del tensor


@pytest.mark.needs("faults")
def test_a_driver_that_cannot_say_is_an_error(driver: DriverUnderTest) -> None:
    with cumem.use_memory_pool("weights"):
        tensor = make(100)
    driver.emulator.fail("cuMemGetInfo", code="CUDA_ERROR_UNKNOWN")
    with pytest.raises(cumem.DriverError, match=r"report\(\)"):
        cumem.report()
    del tensor
