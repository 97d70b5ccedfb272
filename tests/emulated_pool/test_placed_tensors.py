"""Does what torch makes in a scope live in the memory of the emulated pool?"""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from fake_plugin import PATTERN, FakePlugin, live, ramp
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

from cumem._emulated_pool import EmulatedMemPool, use_emulated_pool

DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.int8, torch.int64]
DTYPES += [torch.bool, torch.complex64, torch.float8_e4m3fn, torch.float8_e5m2]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_tensors_of_every_dtype_are_placed_whole(
    plugin: FakePlugin, pool: EmulatedMemPool, dtype: torch.dtype
) -> None:
    expected = (torch.arange(300) % 13).to(dtype)
    with use_emulated_pool(pool):
        placed = (torch.arange(300) % 13).to(dtype)
    assert plugin.holds(placed)
    assert torch.equal(placed.view(torch.uint8), expected.view(torch.uint8))


MAKERS: dict[str, Callable[[], torch.Tensor]] = {
    "tensor": lambda: torch.tensor([3, 1, 4, 1, 5]),
    "scalar": lambda: torch.tensor(3.5),
    "Tensor": lambda: torch.Tensor([3, 1, 4]),
    "as_tensor": lambda: torch.as_tensor([3, 1, 4]),
    "arange": lambda: ramp(9),
    "tensor of an array": lambda: torch.tensor(ramp(9).numpy()),
    "to": lambda: ramp(9).to(torch.float64),
    "clone": lambda: ramp(9).clone(),
    "parameter": lambda: torch.nn.Parameter(ramp(9).float()),
    "deep copy of a parameter": lambda: copy.deepcopy(torch.nn.Parameter(ramp(9).float())),
    "transposed": lambda: ramp(12).view(3, 4).t().contiguous().t(),
    "cat": lambda: torch.cat([ramp(3), ramp(4)]),
    "channels last": lambda: (
        ramp(120).view(2, 3, 4, 5).contiguous(memory_format=torch.channels_last)
    ),
    "second of several": lambda: torch.sort(ramp(9), descending=True)[1],
    "vmap": lambda: torch.vmap(lambda row: row * 2)(ramp(6).view(2, 3)),
    "conjugated": lambda: torch.linalg.eig(torch.diag(ramp(3).float()))[1].conj(),
    "out": lambda: torch.add(ramp(3), 1, out=torch.empty(0, dtype=torch.int64)),
    "grown": lambda: torch.empty(0, dtype=torch.int64).resize_(5).copy_(ramp(5)),
    "set": lambda: torch.empty(0, dtype=torch.int64).set_(ramp(5)),
}


@pytest.mark.parametrize("inference", [False, True])
@pytest.mark.parametrize("name", sorted(MAKERS))
def test_what_an_op_makes_is_placed(
    plugin: FakePlugin, pool: EmulatedMemPool, name: str, inference: bool
) -> None:
    with torch.inference_mode(inference):
        expected = MAKERS[name]()
        with use_emulated_pool(pool):
            made = MAKERS[name]()
    assert plugin.holds(made)
    assert (made.stride(), made.dtype) == (expected.stride(), expected.dtype)
    assert torch.equal(made, expected)


def test_results_that_share_a_storage_still_do(plugin: FakePlugin, pool: EmulatedMemPool) -> None:
    library = torch.library.Library("cumem_test", "FRAGMENT")
    library.define("twins() -> (Tensor, Tensor, Tensor)")

    def twins() -> tuple[torch.Tensor, ...]:
        whole = ramp(100)
        return whole[90:], torch.ones(2), whole

    library.impl("twins", twins, "CompositeExplicitAutograd")
    with use_emulated_pool(pool):
        tail, _, whole = torch.ops.cumem_test.twins()
        whole.mul_(3)
        assert torch.equal(tail, ramp(100)[90:] * 3)
        assert live(pool) == [1024, 512]
        del tail, whole, _
        base = ramp(100)
        view = base.view(10, 10)[3:, ::2]
        rows = torch.unbind(base.view(10, 10))
    base[37] = -1
    assert view.untyped_storage().data_ptr() == base.untyped_storage().data_ptr()
    assert rows[3][7] == -1
    assert len(live(pool)) == 1


def test_uninitialised_tensors_show_the_device_memory(pool: EmulatedMemPool) -> None:
    with use_emulated_pool(pool):
        makers = [
            torch.empty(600, dtype=torch.uint8),
            torch.empty_like(torch.empty(600, dtype=torch.uint8)),
            torch.empty(0, dtype=torch.uint8).resize_(600),
        ]
    start = pool.snapshot()[0]["address"]
    for tensor in makers:
        skip = (tensor.data_ptr() - start) % len(PATTERN)
        assert bytes(tensor.tolist()) == (PATTERN * 4)[skip : skip + 600]


def test_deterministic_fill_reaches_uninitialised_tensors(pool: EmulatedMemPool) -> None:
    torch.use_deterministic_algorithms(True)
    try:
        with use_emulated_pool(pool):
            assert torch.empty(50).isnan().all()
    finally:
        torch.use_deterministic_algorithms(False)


def test_zero_bytes_take_no_block(plugin: FakePlugin, pool: EmulatedMemPool) -> None:
    with use_emulated_pool(pool):
        kept = [torch.empty(0), torch.zeros(3, 0), torch.tensor([])]
    assert (plugin.asked, len(kept)) == ([], 3)


def test_an_op_in_place_moves_nothing(plugin: FakePlugin, pool: EmulatedMemPool) -> None:
    host, out = ramp(10), ramp(10)
    before = host.data_ptr(), out.data_ptr()
    with use_emulated_pool(pool):
        host.add_(1)
        host.view(2, 5).t_().mul_(2)
        torch.add(host, 1, out=out)
        host.resize_(5)
        torch._foreach_add_([host], 1)
    assert (host.data_ptr(), out.data_ptr()) == before
    assert torch.equal(host, ((ramp(10) + 1) * 2 + 1)[:5])
    assert live(pool) == []


def test_host_memory_that_torch_does_not_own_stays(
    plugin: FakePlugin, pool: EmulatedMemPool, tmp_path: Path
) -> None:
    array, path = ramp(10).numpy(), tmp_path / "bytes"
    path.write_bytes(PATTERN)
    torch.save(ramp(10), tmp_path / "saved")
    with use_emulated_pool(pool):
        host = [
            torch.from_numpy(array),
            torch.as_tensor(array),
            torch.from_dlpack(array),
            torch.frombuffer(bytearray(PATTERN), dtype=torch.uint8),
            torch.from_file(str(path), size=100, dtype=torch.uint8),
            torch.load(tmp_path / "saved"),
            torch.load(tmp_path / "saved", mmap=True),
        ]
        assert plugin.holds(host[0].clone())
    assert [plugin.holds(tensor) for tensor in host] == [False] * len(host)
    assert torch.equal(host[5], ramp(10))
    array[4] = -5
    assert host[0][4] == host[1][4] == host[2][4] == -5


def test_a_module_built_in_a_scope_is_placed_and_computes_the_same(
    plugin: FakePlugin, pool: EmulatedMemPool
) -> None:
    def build() -> torch.nn.Module:
        torch.manual_seed(5)
        layer = torch.nn.TransformerEncoderLayer(16, 2, 32, dropout=0, batch_first=True)
        return torch.nn.Sequential(torch.nn.TransformerEncoder(layer, 2), torch.nn.BatchNorm1d(7))

    plain = build()
    with use_emulated_pool(pool):
        module = build()
    state = module.state_dict()
    assert all(plugin.holds(tensor) for tensor in state.values())
    assert all(torch.equal(state[name], tensor) for name, tensor in plain.state_dict().items())
    entry = torch.randn(3, 7, 16)
    for which in (plain, module):
        which(entry).square().sum().backward()
    for ours, theirs in zip(module.parameters(), plain.parameters(), strict=True):
        assert ours.grad is not None
        assert theirs.grad is not None
        assert torch.equal(ours.grad, theirs.grad)


def test_a_deep_copy_of_a_module_captures_parameters_and_not_buffers(
    plugin: FakePlugin, pool: EmulatedMemPool
) -> None:
    module = torch.nn.BatchNorm1d(7)
    with use_emulated_pool(pool):
        twin = copy.deepcopy(module)
    assert all(plugin.holds(parameter) for parameter in twin.parameters())
    assert not any(plugin.holds(buffer) for buffer in twin.buffers())
    assert all(
        torch.equal(ours, twin.state_dict()[name]) for name, ours in module.state_dict().items()
    )


def test_backward_is_not_captured_as_on_a_device(plugin: FakePlugin, pool: EmulatedMemPool) -> None:
    with use_emulated_pool(pool):
        leaf = ramp(9).float().requires_grad_()
        loss = leaf.sin().sum()
        loss.backward()
    assert leaf.grad is not None
    assert (plugin.holds(leaf), plugin.holds(leaf.grad)) == (True, False)
    assert torch.equal(leaf.grad, ramp(9).float().cos())


def test_a_scope_opened_in_backward_captures(plugin: FakePlugin, pool: EmulatedMemPool) -> None:
    made: list[torch.Tensor] = []

    def place(grad: torch.Tensor) -> torch.Tensor:
        with use_emulated_pool(pool):
            made.append(grad * 3)
        return made[0] * 5

    leaf = ramp(9).float().requires_grad_()
    value = leaf.sin()
    value.register_hook(place)
    with use_emulated_pool(EmulatedMemPool(plugin.functions, 0)):
        value.sum().backward()
    assert leaf.grad is not None
    assert [plugin.holds(tensor) for tensor in (made[0], leaf.grad)] == [True, False]
    assert torch.equal(leaf.grad, leaf.detach().cos() * 15)


def test_a_placed_tensor_says_that_it_cannot_grow(pool: EmulatedMemPool) -> None:
    with use_emulated_pool(pool):
        tensor = ramp(10)
        tensor.resize_(4)
        with pytest.raises(RuntimeError, match=r"emulated device memory.*make a new tensor"):
            tensor.resize_(1000)
    assert torch.equal(tensor, ramp(10)[:4])


def test_fake_and_meta_tensors_take_no_block(plugin: FakePlugin, pool: EmulatedMemPool) -> None:
    with use_emulated_pool(pool):
        with FakeTensorMode():
            fake = torch.ones(10) + 1
        meta = torch.ones(10, device="meta") + 1
        with torch.device("meta"):
            kept = [fake * 2, meta * 2, torch._efficientzerotensor(3, device="cpu")]
    assert (plugin.asked, len(kept)) == ([], 3)


def test_a_tracer_sees_the_same_graph_in_a_scope(pool: EmulatedMemPool) -> None:
    def trace() -> str:
        return make_fx(lambda x: torch.ones(3) + x.sin())(ramp(3).float()).code

    expected = trace()
    with use_emulated_pool(pool):
        assert trace() == expected


class Doubled(torch.Tensor):
    """A wrapper whose handler makes tensors."""

    inner: torch.Tensor

    @staticmethod
    def __new__(cls, inner: torch.Tensor) -> Doubled:
        self = torch.Tensor._make_wrapper_subclass(cls, inner.size(), dtype=inner.dtype)
        self.inner = inner
        return self  # type: ignore[no-any-return]

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        inner = [arg.inner if isinstance(arg, Doubled) else arg for arg in args]
        return Doubled(func(*inner, **(kwargs or {})))


def test_what_a_tensor_subclass_makes_is_placed(plugin: FakePlugin, pool: EmulatedMemPool) -> None:
    with use_emulated_pool(pool):
        result = Doubled(ramp(10)) + 1
    assert isinstance(result, Doubled)
    assert plugin.holds(result.inner)
    assert torch.equal(result.inner, ramp(10) + 1)


def test_a_transformers_model_built_from_a_config_lands_whole(
    plugin: FakePlugin, pool: EmulatedMemPool
) -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, vocab_size=100,
    )  # fmt: skip
    with use_emulated_pool(pool):
        model = transformers.LlamaForCausalLM(config)
    tensors = [*model.parameters(), *model.buffers()]
    assert len(tensors) > 20
    assert all(plugin.holds(tensor) for tensor in tensors)
