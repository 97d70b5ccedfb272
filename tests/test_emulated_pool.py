"""Does the emulated pool behave as torch's does, and do tensors of a scope live in its memory?"""

from __future__ import annotations

import contextlib
import copy
import ctypes
import gc
import itertools
import mmap
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode_stack

from cumem import _emulated_pool
from cumem._emulated_pool import (
    EmulatedMemPool,
    PluginFunctions,
    empty_cache,
    memory_snapshot,
    use_emulated_pool,
)
from cumem._emulated_tensors import give

MIB = 1 << 20
LIBC = ctypes.CDLL(None)
LIBC.mprotect.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
PATTERN = bytes(range(1, 252))


class FakePlugin:
    """malloc and free over anonymous maps that start with a pattern; remembers every call."""

    def __init__(self, capacity: int = 1 << 40) -> None:
        self.capacity = capacity
        self.maps: dict[int, mmap.mmap] = {}
        self.asked: list[int] = []
        self.freed: list[int] = []
        self.functions = PluginFunctions(self.malloc, self.free)

    def malloc(self, size: int, device: int, stream: int) -> int | None:
        self.asked.append(size)
        if sum(map(len, self.maps.values())) + size > self.capacity:
            return None
        memory = mmap.mmap(-1, size)
        memory.write((PATTERN * (size // len(PATTERN) + 1))[:size])
        address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
        self.maps[address] = memory
        return address

    def free(self, address: int, size: int, device: int, stream: int) -> None:
        assert len(self.maps.pop(address)) == size
        self.freed.append(size)

    def protect(self, access: int) -> None:
        for address, memory in self.maps.items():
            assert LIBC.mprotect(address, len(memory), access) == 0

    def holds(self, tensor: torch.Tensor) -> bool:
        storage = tensor.untyped_storage()
        start, end = storage.data_ptr(), storage.data_ptr() + storage.nbytes()
        return any(base <= start and end <= base + len(m) for base, m in self.maps.items())


class Owner:
    """Has a block until it dies."""


@pytest.fixture
def plugin() -> FakePlugin:
    return FakePlugin()


@pytest.fixture
def pool(plugin: FakePlugin) -> EmulatedMemPool:
    return EmulatedMemPool(plugin.functions, 0)


def take(pool: EmulatedMemPool, *sizes: int) -> list[Owner]:
    owners = [Owner() for _ in sizes]
    for owner, size in zip(owners, sizes, strict=True):
        give(pool.allocate(size), owner)
    return owners


def blocks(pool: EmulatedMemPool) -> list[tuple[int, str]]:
    found = [block for segment in pool.snapshot() for block in segment["blocks"]]
    return [(block["size"], block["state"]) for block in found]


def live(pool: EmulatedMemPool) -> list[int]:
    return [size for size, state in blocks(pool) if state == "active_allocated"]


def ramp(count: int) -> torch.Tensor:
    return torch.arange(count) * 7 + 3


# The pool


@pytest.mark.parametrize(
    ("size", "segment", "block"),
    [
        (1, 2 * MIB, 512),
        (513, 2 * MIB, 1024),
        (MIB, 2 * MIB, MIB),
        (MIB + 1, 20 * MIB, MIB + 512),
        (10 * MIB - 512, 20 * MIB, 10 * MIB - 512),
        (10 * MIB, 10 * MIB, 10 * MIB),
        (11 * MIB - 5, 12 * MIB, 12 * MIB),
        (30 * MIB, 30 * MIB, 30 * MIB),
    ],
)
def test_a_request_is_rounded_and_served_from_a_segment_of_its_class(
    plugin: FakePlugin, pool: EmulatedMemPool, size: int, segment: int, block: int
) -> None:
    owners = take(pool, size)
    assert plugin.asked == [segment]
    assert live(pool) == [block]
    assert pool.snapshot()[0]["blocks"][0]["requested_size"] == size
    del owners


def test_small_blocks_share_a_segment_and_never_use_a_large_one(
    plugin: FakePlugin, pool: EmulatedMemPool
) -> None:
    owners = take(pool, 3 * MIB, 1000, 2000)
    assert plugin.asked == [20 * MIB, 2 * MIB]
    kinds = {segment["segment_type"]: segment for segment in pool.snapshot()}
    assert [block["size"] for block in kinds["small"]["blocks"][:2]] == [1024, 2048]
    assert kinds["large"]["allocated_size"] == 3 * MIB
    del owners


def test_a_large_block_is_split_only_if_more_than_one_mib_is_left(pool: EmulatedMemPool) -> None:
    owners = take(pool, 9 * MIB, 9 * MIB, MIB + 1)
    assert blocks(pool) == [(9 * MIB, "active_allocated")] * 2 + [(2 * MIB, "active_allocated")]
    del owners


def test_the_free_block_that_fits_best_is_used_again(pool: EmulatedMemPool) -> None:
    owners = take(pool, 4096, 512, 1024, 512, 2048, 512)
    before = pool.snapshot()[0]["blocks"]
    owners[0] = owners[2] = owners[4] = Owner()
    block = pool.allocate(900)
    assert block.address == before[2]["address"]
    give(block, owners[0])


def test_neighbours_become_one_block_when_both_are_free(pool: EmulatedMemPool) -> None:
    owners = take(pool, 512, 512, 512)
    owners[0] = Owner()
    assert [size for size, _ in blocks(pool)] == [512, 512, 512, 2 * MIB - 1536]
    owners[2] = Owner()
    assert [size for size, _ in blocks(pool)] == [512, 512, 2 * MIB - 1024]
    owners[1] = Owner()
    assert blocks(pool) == [(2 * MIB, "inactive")]


def test_the_snapshot_adds_up(pool: EmulatedMemPool) -> None:
    owners = take(pool, 700, 5 * MIB, 100)[::2]
    for segment in pool.snapshot(include_traces=False):
        assert sum(block["size"] for block in segment["blocks"]) == segment["total_size"]
        starts = [block["address"] for block in segment["blocks"]]
        assert starts == sorted(starts)
        assert starts[0] == segment["address"]
        assert (segment["segment_pool_id"], segment["device"]) == (pool.id, 0)
    assert [segment["allocated_size"] for segment in pool.snapshot()].count(1536) == len(owners) - 1
    assert [info for info in memory_snapshot() if info["segment_pool_id"] == pool.id] == (
        pool.snapshot()
    )


def test_segments_stay_while_the_pool_does(plugin: FakePlugin, pool: EmulatedMemPool) -> None:
    take(pool, 100, 3 * MIB)
    empty_cache()
    assert plugin.freed == []
    take(pool, 100, 3 * MIB)
    assert plugin.asked == [2 * MIB, 20 * MIB]


def test_retiring_gives_free_segments_back_and_live_blocks_outlive_it(
    plugin: FakePlugin, pool: EmulatedMemPool
) -> None:
    owners = take(pool, 200, 100)
    del owners[0]
    take(pool, 3 * MIB)
    pool.retire()
    assert plugin.freed == [20 * MIB]
    empty_cache()
    assert [info["allocated_size"] for info in memory_snapshot() if _of(info, pool)] == [512]
    owners.clear()
    assert plugin.freed == [20 * MIB]
    empty_cache()
    assert plugin.freed == [20 * MIB, 2 * MIB]
    assert not [info for info in memory_snapshot() if _of(info, pool)]


def _of(info: dict[str, Any], pool: EmulatedMemPool) -> bool:
    return bool(info["segment_pool_id"] == pool.id)


def test_a_retired_pool_cannot_be_used(pool: EmulatedMemPool) -> None:
    pool.retire()
    uses: list[Callable[[], object]] = [pool.snapshot, pool.use_count, pool.retire]
    uses += [lambda: pool.allocate(1), use_emulated_pool(pool).__enter__]
    for use in uses:
        with pytest.raises(RuntimeError, match="was retired"):
            use()


def test_retiring_while_a_scope_is_open_on_the_device_changes_nothing(
    plugin: FakePlugin, pool: EmulatedMemPool
) -> None:
    take(pool, 100)
    with (
        use_emulated_pool(EmulatedMemPool(plugin.functions, 0)),
        pytest.raises(RuntimeError, match="device 0"),
    ):
        pool.retire()
    with use_emulated_pool(EmulatedMemPool(plugin.functions, 1)):
        pool.retire()
    assert plugin.freed == [2 * MIB]


def test_out_of_memory_says_how_much_was_asked_for_and_where(plugin: FakePlugin) -> None:
    plugin.capacity = 4 * MIB
    pool = EmulatedMemPool(plugin.functions, 3)
    with (
        use_emulated_pool(pool),
        pytest.raises(torch.OutOfMemoryError, match=r"device 3 .* 5242880 bytes .* 20 MiB"),
    ):
        torch.zeros(5 * MIB, dtype=torch.uint8)
    with use_emulated_pool(pool):
        assert plugin.holds(torch.zeros(10))


def test_retired_segments_are_given_back_to_serve_a_request_only_outside_scopes(
    plugin: FakePlugin, pool: EmulatedMemPool
) -> None:
    plugin.capacity = 4 * MIB
    retired = EmulatedMemPool(plugin.functions, 0)
    owners = take(retired, MIB, MIB, MIB)
    retired.retire()
    owners.clear()
    with use_emulated_pool(pool), pytest.raises(torch.OutOfMemoryError):
        torch.ones(10)
    take(pool, 100)
    assert plugin.freed == [2 * MIB, 2 * MIB]


# Scopes


def test_the_innermost_scope_wins(plugin: FakePlugin) -> None:
    pools = [EmulatedMemPool(plugin.functions, 0) for _ in range(3)]
    with use_emulated_pool(pools[0]):
        first = torch.ones(1000)
        with use_emulated_pool(pools[1]):
            second = torch.ones(3000)
        third = torch.ones(5000)
    fourth = torch.ones(7000)
    assert [live(pool) for pool in pools] == [[4096, 20480], [12288], []]
    assert not plugin.holds(fourth)
    assert [plugin.holds(tensor) for tensor in (first, second, third)] == [True] * 3


def test_a_pool_cannot_be_entered_twice_at_once(pool: EmulatedMemPool) -> None:
    errors: list[str] = []

    def enter() -> None:
        try:
            with use_emulated_pool(pool):
                errors.append("none")
        except RuntimeError as error:
            errors.append(str(error))

    with use_emulated_pool(pool):
        enter()
        in_thread(enter)
        assert pool.use_count() == 2
    assert ["already recording" in error for error in errors] == [True, True]
    assert pool.use_count() == 1
    enter()
    assert errors[-1] == "none"


def in_thread(work: Callable[[], object]) -> None:
    thread = threading.Thread(target=work)
    thread.start()
    thread.join()


def test_scopes_may_be_left_in_any_order(plugin: FakePlugin) -> None:
    first, second = (EmulatedMemPool(plugin.functions, 0) for _ in range(2))
    outer, inner = contextlib.ExitStack(), contextlib.ExitStack()
    outer.enter_context(use_emulated_pool(first))
    inner.enter_context(use_emulated_pool(second))
    outer.close()
    kept = torch.ones(1000)
    assert (live(first), live(second)) == ([], [4096])
    inner.close()
    assert not plugin.holds(torch.ones(10))
    assert _get_current_dispatch_mode_stack() == []
    del kept


class Counting(TorchDispatchMode):
    ops = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.ops += 1
        return func(*args, **(kwargs or {}))


def test_a_scope_may_be_left_under_another_dispatch_mode(
    plugin: FakePlugin, pool: EmulatedMemPool
) -> None:
    scope = contextlib.ExitStack()
    scope.enter_context(use_emulated_pool(pool))
    with Counting() as counting:
        inside = torch.ones(10)
        scope.close()
        outside = torch.ones(10)
        assert _get_current_dispatch_mode_stack()[-1] is counting
    assert counting.ops == 2
    assert (plugin.holds(inside), plugin.holds(outside)) == (True, False)
    with use_emulated_pool(pool):
        assert plugin.holds(torch.ones(10))
    assert _get_current_dispatch_mode_stack() == []


def test_a_suspended_generator_may_be_closed_by_another_thread(
    plugin: FakePlugin, pool: EmulatedMemPool
) -> None:
    def suspended() -> Iterator[torch.Tensor]:
        with use_emulated_pool(pool):
            yield torch.ones(10)

    generator = suspended()
    assert plugin.holds(next(generator))
    in_thread(generator.close)  # type: ignore[attr-defined]
    assert not plugin.holds(torch.ones(10))
    assert pool.use_count() == 1
    with use_emulated_pool(pool):
        assert plugin.holds(torch.ones(10))


def test_a_scope_may_be_opened_inside_an_operator(
    plugin: FakePlugin, pool: EmulatedMemPool
) -> None:
    inner = EmulatedMemPool(plugin.functions, 0)
    made: list[torch.Tensor] = []

    @torch.library.custom_op("cumem_test::opens_a_scope", mutates_args=())
    def opens_a_scope(tensor: torch.Tensor) -> torch.Tensor:
        with use_emulated_pool(inner):
            made.append(tensor * 2)
        return tensor + 1

    with use_emulated_pool(pool):
        result = opens_a_scope(ramp(1000))
        assert len(_get_current_dispatch_mode_stack()) == 1
    assert _get_current_dispatch_mode_stack() == []
    assert (live(pool), live(inner)) == ([8192], [8192])
    assert torch.equal(result - 1, ramp(1000))


def test_an_exception_ends_the_scope(plugin: FakePlugin, pool: EmulatedMemPool) -> None:
    with pytest.raises(KeyError), use_emulated_pool(pool):
        raise KeyError
    assert not plugin.holds(torch.ones(10))
    assert pool.use_count() == 1


def test_other_threads_are_not_captured(plugin: FakePlugin, pool: EmulatedMemPool) -> None:
    made: list[torch.Tensor] = []
    with use_emulated_pool(pool):
        in_thread(lambda: made.append(torch.ones(10)))
        mode = _get_current_dispatch_mode_stack()[0]

        def under_a_mode_that_torch_handed_on() -> None:
            with mode:
                made.append(torch.ones(10))

        in_thread(under_a_mode_that_torch_handed_on)
    assert [plugin.holds(tensor) for tensor in made] == [False, False]


# Tensors

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


# The end of tensors


def test_a_block_is_freed_once_with_the_last_view(pool: EmulatedMemPool) -> None:
    with use_emulated_pool(pool):
        base = ramp(100)
        view = base[50:]
        array = base.numpy()
        del base
        assert len(live(pool)) == 1
        del view
        assert len(live(pool)) == 1
        del array
    assert live(pool) == []


def test_tensors_may_die_on_any_thread_and_in_cycles(pool: EmulatedMemPool) -> None:
    with use_emulated_pool(pool):
        kept = [ramp(100 * n) for n in range(1, 9)]
        cycle: list[object] = [ramp(50)]
        cycle.append(cycle)
    in_thread(kept.clear)
    del cycle
    gc.collect()
    assert live(pool) == []
    assert blocks(pool) == [(2 * MIB, "inactive")]


def at_line(count: int, action: Callable[[], object]) -> Any:
    """A trace function that runs `action` before the count-th line of the pool's code."""
    seen = itertools.count(1)

    def trace(frame: Any, event: str, arg: object) -> Any:
        if frame.f_code.co_filename != _emulated_pool.__file__:
            return None
        if event == "line" and next(seen) == count:
            action()
        return trace

    return trace


def test_a_finalizer_may_use_pools_at_any_point_of_a_call(plugin: FakePlugin) -> None:
    other = EmulatedMemPool(plugin.functions, 0)
    for count in itertools.count(1):
        pool, retired = (EmulatedMemPool(plugin.functions, device) for device in (0, 1))
        kept = take(pool, 512, 2048, 512, 1024, 512)
        take(retired, 512)
        done: list[int] = []

        def finalizer(
            pool: EmulatedMemPool = pool, kept: list[Owner] = kept, done: list[int] = done
        ) -> None:
            del kept[3]
            with use_emulated_pool(other):
                kept += take(pool, 700, 2048)
            empty_cache()
            done += [len(pool.snapshot()), len(memory_snapshot())]

        del kept[1]
        before = sys.gettrace()
        sys.settrace(at_line(count, finalizer))
        try:
            kept += take(pool, 900, MIB, MIB, 100)
            retired.retire()
            empty_cache()
        finally:
            sys.settrace(before)
        empty_cache()
        assert_tiled(pool)
        assert len(live(pool)) == len(kept)
        assert not [info for info in memory_snapshot() if _of(info, retired)]
        kept.clear()
        pool.retire()
        if not done:
            break
    assert count > 60


def assert_tiled(pool: EmulatedMemPool) -> None:
    for segment in pool.snapshot():
        end = segment["address"]
        for block in segment["blocks"]:
            assert block["address"] == end
            end += block["size"]
        assert end == segment["address"] + segment["total_size"]
        states = [block["state"] for block in segment["blocks"]]
        assert ("inactive", "inactive") not in itertools.pairwise(states)


def test_garbage_collection_at_any_time_leaves_tensors_whole(
    plugin: FakePlugin, pool: EmulatedMemPool
) -> None:
    class Maker:
        def __init__(self) -> None:
            self.cycle = self
            self.tensor = ramp(20)

        def __del__(self) -> None:
            with use_emulated_pool(EmulatedMemPool(plugin.functions, 0)):
                made.append(ramp(30))

    made: list[torch.Tensor] = []
    kept: list[torch.Tensor] = []
    thresholds = gc.get_threshold()
    gc.set_threshold(1, 1, 1)
    try:
        with use_emulated_pool(pool):
            for count in range(40):
                Maker()
                kept.append(ramp(10 + count))
                del kept[:-20:2]
    finally:
        gc.set_threshold(*thresholds)
    gc.collect()
    assert all(torch.equal(tensor, ramp(30)) and plugin.holds(tensor) for tensor in made)
    assert all(torch.equal(tensor, ramp(len(tensor))) for tensor in kept)
    assert (len(made), len(live(pool))) == (40, len(kept))


def test_threads_that_make_and_drop_tensors_at_once_keep_theirs(plugin: FakePlugin) -> None:
    pools = [EmulatedMemPool(plugin.functions, 0) for _ in range(4)]
    kept: dict[int, list[torch.Tensor]] = {}

    def work(index: int) -> None:
        mine = kept.setdefault(index, [])
        with use_emulated_pool(pools[index]):
            for count in range(200):
                mine.append(ramp(count + 1) + index)
                kept.get((index + 1) % 4, [None])[:] = kept.get((index + 1) % 4, [None])[-30:]

    threads = [threading.Thread(target=work, args=(index,)) for index in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for index, mine in kept.items():
        assert all(torch.equal(tensor, ramp(len(tensor)) + index) for tensor in mine)
    assert sum(len(live(pool)) for pool in pools) == sum(map(len, kept.values()))


def test_memory_that_is_asleep_is_not_touched(plugin: FakePlugin, pool: EmulatedMemPool) -> None:
    with use_emulated_pool(pool):
        kept, lost = ramp(1000), ramp(2000)
    plugin.protect(mmap.PROT_NONE if hasattr(mmap, "PROT_NONE") else 0)
    view = kept.view(10, 100)[3]
    del lost
    gc.collect()
    assert live(pool) == [8192]
    with use_emulated_pool(EmulatedMemPool(FakePlugin().functions, 0)):
        view = view[7:]
    plugin.protect(mmap.PROT_READ | mmap.PROT_WRITE)
    assert torch.equal(view, ramp(1000)[307:400])
    assert torch.equal(kept, ramp(1000))


def test_a_forked_child_leaves_the_memory_to_its_parent(
    plugin: FakePlugin, pool: EmulatedMemPool
) -> None:
    with use_emulated_pool(pool):
        kept = ramp(10)
        child = os.fork()
        if child == 0:
            escaped = not plugin.holds(torch.ones(10))
            try:
                pool.allocate(1)
            except RuntimeError as error:
                os._exit(0 if escaped and "forked" in str(error) else 1)
            os._exit(2)
        assert os.waitpid(child, 0)[1] == 0
    assert torch.equal(kept, ramp(10))


def test_live_tensors_at_exit_are_silent() -> None:
    script = f"""
import sys, threading, torch
sys.path[:0] = {[str(Path(__file__).parent)]!r}
from test_emulated_pool import FakePlugin, EmulatedMemPool, use_emulated_pool
plugin = FakePlugin()
pool = EmulatedMemPool(plugin.functions, 0)
scope = use_emulated_pool(pool)
scope.__enter__()
module = torch.nn.Linear(9, 9)
loss = module(torch.ones(3, 9)).sum()
torch.kept = torch.ones(5)
torch.kept.self = torch.kept
local = threading.local()
local.tensor = torch.ones(7)
threading.Thread(target=lambda: local.__setattr__("tensor", module.weight * 2)).start()
scripted = torch.jit.freeze(torch.jit.trace(module.eval(), torch.ones(3, 9)))
"""
    paths = [str(Path(_emulated_pool.__file__).parents[1]), *sys.path]
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", script],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


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
