"""Does an adoption that cannot be, or that fails, leave every tensor valid and say what it left?"""

from __future__ import annotations

import gc
from collections.abc import Callable

import pytest
import torch
from adopt_support import everything, filled
from support import (
    MIB,
    DriverUnderTest,
    bytes_of,
    named_tensors,
    pointers,
    scope_on_a_thread,
    state,
    tag_stats,
)
from torch import nn

import cumem
from cumem import _packing, _relocation


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
