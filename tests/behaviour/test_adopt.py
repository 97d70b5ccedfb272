"""Does a module that was made anywhere move into packed memory, whole, and stay what it is?"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from adopt_support import everything, filled
from support import (
    GRANULE,
    MIB,
    DriverUnderTest,
    bytes_of,
    fill_pattern,
    in_thread,
    named_tensors,
    pointers,
    raw,
    tag_stats,
)
from torch import nn

import cumem
from cumem import _packing


def shapes(module: nn.Module) -> dict[str, Any]:
    return {
        n: (id(t), type(t), t.dtype, t.shape, t.stride(), t.requires_grad, t.is_inference())
        for n, t in named_tensors(module).items()
    }


@pytest.mark.parametrize("source", [None, "weights", "elsewhere"])
def test_tensors_stay_what_they_are_at_their_new_place(source: str | None) -> None:
    module = everything(source)
    calls: list[object] = []
    module.fused.register_hook(calls.append)
    module.fused.grad = torch.ones_like(module.fused)
    gradient = module.fused.grad
    expected, before, old = bytes_of(module), shapes(module), pointers(module)
    adopted = cumem.adopt(module)
    assert bytes_of(module) == expected
    assert shapes(module) == before
    assert not set(pointers(module).values()) & set(old.values()) - {0}
    assert cumem.covered(module) == []
    assert (adopted.segments, adopted.left_bytes) == (1, 0)
    assert module.head.weight is module.embedding.weight
    with torch.no_grad():
        module.fused[30:60] += 1
    assert torch.equal(raw(module.part), raw(module.fused[30:60]))
    assert module.fused.grad is gradient
    module.fused.sum().backward()
    assert len(calls) == 1
    after = bytes_of(module)
    cumem.sleep(tags=["weights"])
    cumem.wake_up()
    assert bytes_of(module) == after


def uneven(count: int) -> nn.ParameterList:
    """Some blocks of nearly 12 MiB, and many small ones."""
    sizes = [12 * MIB - 777 * (at + 1) for at in range(count)]
    small = [1000 + at for at in range(50)]
    return nn.ParameterList(
        [nn.Parameter(torch.empty(n, dtype=torch.uint8), False) for n in [*sizes, *small]]
    )


def aligned_bytes(module: nn.Module) -> int:
    return sum(-(-tensor.numel() // 512) * 512 for tensor in named_tensors(module).values())


def test_holes_of_the_loader_are_gone(driver: DriverUnderTest) -> None:
    start = driver.used_bytes()
    scratch = []
    with cumem.use_memory_pool("weights"), cumem.default_device():
        module = nn.ModuleList()
        for _ in range(6):  # what a loader leaves between the weights
            module.append(uneven(1))
            scratch.append(torch.empty(15 * MIB, dtype=torch.uint8))
    for at, part in enumerate(module):
        filled(part, at)
    del scratch
    expected = bytes_of(module)
    live = aligned_bytes(module)
    assert tag_stats("weights").segment_bytes > 2 * live
    adopted = cumem.adopt(module)
    assert bytes_of(module) == expected
    stats = tag_stats("weights")
    assert (stats.segments, stats.segment_bytes) == (1, adopted.segment_bytes)
    assert live - 512 * 306 <= adopted.bytes <= live
    assert stats.segment_bytes <= 1.01 * live + 2 * MIB
    if driver.emulated:  # the real one also takes memory for kernels, at their first use
        assert driver.used_bytes() - start <= 1.01 * live + 2 * MIB
    assert cumem.stats().physical_bytes == stats.segment_bytes
    again = cumem.adopt(module)
    assert (again.tensors, again.segments) == (0, 0)


@pytest.mark.parametrize("tag", ["weights", "elsewhere"])
def test_room_for_one_segment_is_enough(
    driver: DriverUnderTest, monkeypatch: pytest.MonkeyPatch, tag: str
) -> None:
    monkeypatch.setattr(_packing, "SEGMENT_BYTES", MIB)
    with cumem.use_memory_pool(tag), cumem.default_device():
        module = uneven(8)
    filled(module)
    expected = bytes_of(module)
    with driver.another_tenant(leaves=20 * MIB):
        adopted = cumem.adopt(module)
    assert adopted.segments >= 8
    assert bytes_of(module) == expected
    assert cumem.covered(module) == []


def test_segments_of_many_are_well_filled(monkeypatch: pytest.MonkeyPatch) -> None:
    with cumem.default_device():
        module = filled(uneven(4))
    monkeypatch.setattr(_packing, "SEGMENT_BYTES", 20 * MIB)
    adopted = cumem.adopt(module)
    assert adopted.segments in (2, 3)  # as the small ones lie between the others or after them
    most = aligned_bytes(module) + adopted.segments * GRANULE
    assert tag_stats("weights").segment_bytes == adopted.segment_bytes <= most


def test_model_of_another_thread_is_adopted() -> None:
    """As loaders do that make tensors in threads of their own: no scope sees them."""
    with pytest.warns(UserWarning, match="nothing was captured"), cumem.use_memory_pool("weights"):
        module = in_thread(lambda: everything(None))
    assert "fused" in cumem.covered(module)
    cumem.adopt(module)
    assert cumem.covered(module) == []


def test_old_memory_that_others_hold_is_reported() -> None:
    module = everything("elsewhere")
    view = module.turned.detach()
    expected = raw(view.t()).cpu().clone()
    adopted = cumem.adopt(module)
    assert adopted.left_bytes == 40 * 50 * 4
    assert torch.equal(raw(view.t()).cpu(), expected)
    assert cumem.tag_of(view) == "elsewhere"


def test_policy_is_what_was_asked_for_and_kept_tensors_stay_kept() -> None:
    module = everything("elsewhere")
    cumem.keep(module.fused)
    expected = bytes_of(module)
    cumem.adopt(module, "scratch", on_sleep="discard")
    report = cumem.sleep(tags=["scratch"])
    assert report.discarded_bytes > 0
    cumem.wake_up(fill="poison")
    after = bytes_of(module)
    assert (after["fused"], after["part"]) == (expected["fused"], expected["part"])
    assert set(after["turned"]) == {0xFF}


def test_module_without_bytes_needs_nothing() -> None:
    module = nn.Module()
    module.register_buffer("none", torch.empty(0, 3, device=cumem.default_device()))
    assert cumem.adopt(module) == cumem.Adopted(0, 0, 0, 0, 0)


@pytest.mark.machine(devices=2)
def test_each_tensor_stays_on_its_device() -> None:
    kind = cumem.default_device().type
    module = nn.Module()
    for index in (0, 1):
        with cumem.use_memory_pool("elsewhere", device=index):
            made = torch.empty(1000 + index, device=kind if kind == "cpu" else f"{kind}:{index}")
        fill_pattern(made, index)
        module.register_buffer(f"on{index}", made)
    expected = bytes_of(module)
    before = [device.mapped_bytes for device in cumem.stats().devices]
    assert cumem.adopt(module).segments == 2
    del made
    assert bytes_of(module) == expected
    cumem.trim()
    assert [device.mapped_bytes for device in cumem.stats().devices] == [GRANULE, GRANULE]
    assert before == [GRANULE, GRANULE]


def test_what_was_added_since_moves_once() -> None:
    with cumem.default_device():
        module = nn.ModuleList([nn.Linear(8, 8)])
        cumem.adopt(module)
        module.append(nn.Linear(8, 8))
    assert cumem.adopt(module).tensors == 2
    places, expected = pointers(module), bytes_of(module)
    assert cumem.adopt(module).tensors == 0
    assert pointers(module) == places
    with cumem.default_device():
        module.append(nn.Linear(8, 8))
    assert cumem.adopt(module).tensors == 4, "what is new shares a segment with what was alone"
    assert cumem.adopt(module).tensors == 0
    assert {name: bytes_of(module)[name] for name in expected} == expected


def test_module_that_shares_weights_with_another_moves_once() -> None:
    with cumem.default_device():
        one, other = nn.Linear(8, 8), nn.Linear(8, 8)
    other.weight = one.weight
    cumem.adopt(one)
    assert cumem.adopt(other).tensors == 1
    places = pointers(other)
    assert (cumem.adopt(other).tensors, cumem.adopt(one).tensors) == (0, 0)
    assert pointers(other) == places
    assert other.weight is one.weight
