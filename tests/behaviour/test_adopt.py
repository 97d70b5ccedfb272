"""Does a module that was made anywhere move into packed memory, whole, and stay what it is?"""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

import pytest
import torch
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
    scope_on_a_thread,
    state,
    tag_stats,
)
from torch import nn

import cumem
from cumem import _packing, _relocation


class Everything(nn.Module):
    """All that a module may hold: ties, views, odd layouts and types, gradients, hooks."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(70, 30)
        self.head = nn.Linear(30, 70, bias=False)
        self.head.weight = self.embedding.weight
        self.fused = nn.Parameter(torch.empty(90, 30))
        self.part = nn.Parameter(self.fused.data[30:60])
        self.turned = nn.Parameter(torch.empty(40, 50).t(), requires_grad=False)
        self.conv = nn.Conv2d(3, 5, 2).to(memory_format=torch.channels_last)
        self.register_buffer("columns", torch.empty(33, 20)[:, 5:17], persistent=False)
        self.register_buffer("row", torch.empty(9).expand(4, 9))
        self.register_buffer("none", torch.empty(3, 0))
        self.register_buffer("bytes", torch.empty(1001, dtype=torch.uint8)[3:])
        self.register_buffer("scalar", torch.empty((), dtype=torch.bfloat16))
        self.register_buffer("tiny", torch.empty(8, dtype=torch.float8_e4m3fn))
        with torch.inference_mode():
            self.frozen = nn.Parameter(torch.empty(100))


def filled(module: nn.Module, seed: int = 1) -> nn.Module:
    for at, tensor in enumerate(named_tensors(module).values()):
        storage = torch.empty(0, dtype=torch.uint8, device=tensor.device)
        fill_pattern(storage.set_(tensor.untyped_storage()), seed + at)
    return module


def everything(tag: str | None) -> nn.Module:
    if tag is None:
        with cumem.default_device():
            return filled(Everything())
    with cumem.use_memory_pool(tag), cumem.default_device():
        module = Everything()
    return filled(module)


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
    assert driver.used_bytes() - start <= 1.01 * live + 2 * MIB
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


@pytest.mark.needs("memory that plain tensors do not use")
def test_failure_half_way_leaves_every_tensor_valid_and_can_be_repeated(
    driver: DriverUnderTest, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_packing, "SEGMENT_BYTES", MIB)
    sizes = [12 * MIB - 777 * (at + 1) for at in range(6)]  # each fills a segment of its own well
    module = filled(
        nn.ParameterList(nn.Parameter(torch.empty(n, dtype=torch.uint8), False) for n in sizes)
    )
    expected = bytes_of(module)
    with driver.another_tenant(leaves=30 * MIB):
        with pytest.raises(cumem.DeviceOutOfMemoryError) as caught:
            cumem.adopt(module)
        assert bytes_of(module) == expected
        moved = [name for name, t in named_tensors(module).items() if cumem.tag_of(t)]
        assert len(moved) >= 2
        text = f"{len(moved)} tensors ({sum_text(module, moved)}) were moved, {6 - len(moved)} ("
        assert text in str(caught.value)
        cumem.check()
    places = {name: module.get_parameter(name).data_ptr() for name in moved}
    rest = cumem.adopt(module)
    assert rest.tensors == 6 - len(moved)
    assert bytes_of(module) == expected
    assert cumem.covered(module) == []
    assert places == {name: module.get_parameter(name).data_ptr() for name in moved}


def sum_text(module: nn.Module, names: list[str]) -> str:
    return f"{sum(module.get_parameter(name).numel() for name in names) / MIB:.1f} MiB"


@pytest.mark.parametrize("nth", [0, 1, 7])
def test_refused_exchange_leaves_every_tensor_at_its_old_place(
    monkeypatch: pytest.MonkeyPatch, nth: int
) -> None:
    module = everything("elsewhere")
    expected, before = bytes_of(module), pointers(module)
    real, calls = _relocation._set_data, []

    def refusing(tensor: torch.Tensor, data: torch.Tensor) -> None:
        calls.append(tensor.shape)
        if len(calls) == nth + 1:
            raise RuntimeError("not today")
        real(tensor, data)

    with monkeypatch.context() as patch:
        patch.setattr(_relocation, "_set_data", refusing)
        with pytest.raises(RuntimeError, match="not today"):
            cumem.adopt(module)
    calls.clear()
    assert pointers(module) == before
    assert bytes_of(module) == expected
    assert module.part.data_ptr() == module.fused[30:60].data_ptr()
    gc.collect()
    assert tag_stats("weights").segments == 0


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


def test_everything_that_cannot_move_is_named_and_nothing_changes() -> None:
    module = everything("elsewhere")
    module.register_buffer("thin", torch.ones(2, 2).to_sparse())
    module.register_buffer("void", torch.ones(2, device="meta"))
    module.register_buffer("lazy", torch.ones(2, dtype=torch.complex64).conj())
    before, counters = pointers_of_dense(module), state()
    with pytest.raises(ValueError, match=r"3 tensor.* moved: thin .*, void .*meta.*, lazy .*Noth"):
        cumem.adopt(module)
    assert (pointers_of_dense(module), state()) == (before, counters)


def pointers_of_dense(module: nn.Module) -> dict[str, int]:
    tensors = named_tensors(module).items()
    return {n: t.data_ptr() for n, t in tensors if n not in ("thin", "void", "lazy")}


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda module: cumem.adopt("module"), TypeError, "expected a module, not str"),
        (lambda module: cumem.adopt(module, 3), TypeError, "a tag must be a string"),
        (lambda module: cumem.adopt(module, ""), ValueError, "must not be empty"),
        (lambda module: cumem.adopt(module, on_sleep="no"), ValueError, "unknown on_sleep 'no'"),
    ],
)
def test_wrong_arguments_change_nothing(
    call: Callable[[nn.Module], object], error: type[Exception], message: str
) -> None:
    module = everything("elsewhere")
    before, counters = pointers(module), state()
    with pytest.raises(error, match=message):
        call(module)
    assert (pointers(module), state()) == (before, counters)


def test_sleeping_module_and_open_scopes_are_refused() -> None:
    module = everything("elsewhere")
    expected, before = bytes_of(module), pointers(module)
    cumem.sleep(tags=["elsewhere"])
    with pytest.raises(cumem.AsleepError, match=r"asleep: .*fused"):
        cumem.adopt(module)
    cumem.wake_up()
    with (
        scope_on_a_thread("kv_cache", name="busy"),
        pytest.raises(cumem.BusyError, match=r"thread 'busy.* of tag 'kv_cache' open"),
    ):
        cumem.adopt(module)
    assert (bytes_of(module), pointers(module)) == (expected, before)


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
