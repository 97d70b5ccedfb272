"""Do tensors that take a file's bytes as they are come in one stream, and is a failure told?"""

from __future__ import annotations

import importlib
import os
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import host_tensor, write_file, write_shards
from support import MIB, DriverUnderTest, bytes_of, outside_scopes, same_bytes, state
from torch import nn

import cumem
from cumem import _runtime, _streaming

KIB = 1 << 10
ROWS, WIDTH = 61, 40  # of 160 bytes in float32


@pytest.fixture(autouse=True)
def small_steps() -> None:
    """Buffers so small that a test's files take many of them."""
    cumem.configure(
        cumem.Options(load_buffer_bytes=16 * KIB, load_ring_bytes=64 * KIB, load_threads=3)
    )


class Mixed(nn.Module):
    """Fused rows, columns, other types, other layouts, ties, odd sizes, nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Parameter(torch.zeros(3 * ROWS, WIDTH))
        self.sides = nn.Parameter(torch.zeros(ROWS, 2 * WIDTH))
        self.short = nn.Parameter(torch.zeros(ROWS, WIDTH, dtype=torch.bfloat16))
        self.turned = nn.Parameter(torch.zeros(WIDTH, ROWS).t())
        self.embed = nn.Parameter(torch.zeros(777, 31, dtype=torch.float16))
        self.head = self.embed
        self.register_buffer("odd", torch.zeros(3, dtype=torch.uint8))
        self.register_buffer("flags", torch.zeros(5, dtype=torch.bool))
        self.register_buffer("scalar", torch.zeros((), dtype=torch.int64))
        self.register_buffer("none", torch.zeros(0, 4))


FUSED = ("q", "k", "v")
AS_THEY_ARE = (*FUSED, "head", "embed", "odd", "flags", "scalar")  # tied ones are read once


def source() -> dict[str, torch.Tensor]:
    with outside_scopes():
        tensors = {name: torch.randn(ROWS, WIDTH) for name in (*FUSED, "gate", "up", "short")}
        tensors |= {"turned": torch.randn(ROWS, WIDTH), "none": torch.zeros(0, 4)}
        tensors["embed"] = torch.randn(777, 31).half()
        tensors["head"] = tensors["embed"].clone()
        tensors["odd"] = host_tensor(torch.uint8, (3,), 1)
        tensors["flags"] = torch.tensor([True, False, True, True, False])
        tensors["scalar"] = torch.tensor(123456789)
    order = ("odd", "gate", "q", "short", "v", "embed", "k", "flags", "turned", "head")
    return {name: tensors[name] for name in (*order, "up", "none", "scalar")}


def views(module: nn.Module) -> dict[str, torch.Tensor]:
    q, k, v = module.qkv.view(3, ROWS, WIDTH).unbind(0)
    return {"q": q, "k": k, "v": v, "gate": module.sides[:, :WIDTH], "up": module.sides[:, WIDTH:]}


def pooled(make: Callable[[], nn.Module]) -> nn.Module:
    with cumem.use_memory_pool("weights"), cumem.default_device():
        return make()


def streamed() -> int:
    return _runtime.current().allocator.file_bytes()


def bytes_in(tensors: dict[str, torch.Tensor], *names: str) -> int:
    return sum(tensors[name].nbytes for name in names)


def expect(module: nn.Module, tensors: dict[str, torch.Tensor]) -> None:
    places = {**dict(module.named_parameters(remove_duplicate=False)), **views(module)}
    places |= dict(module.named_buffers())
    with outside_scopes():
        for name, tensor in tensors.items():
            found = places[name].detach().cpu()
            assert torch.equal(found, tensor.to(found.dtype)), name


def linear(count: int = 4) -> nn.Module:
    """Layers of 160 KiB each, all of which are streamed."""
    return pooled(lambda: nn.ModuleList([nn.Linear(200, 200) for _ in range(count)]))


def weights_of(module: nn.Module, seed: int = 1) -> dict[str, torch.Tensor]:
    with outside_scopes():
        return {
            name: host_tensor(torch.uint8, (tensor.nbytes,), seed + at)
            .view(torch.float32)
            .view(tensor.shape)
            for at, (name, tensor) in enumerate(module.state_dict().items())
        }


def holds(module: nn.Module, tensors: dict[str, torch.Tensor]) -> bool:
    return all(same_bytes(t, tensors[name]) for name, t in module.state_dict().items())


def test_what_is_as_it_is_is_streamed_and_the_rest_converted(tmp_path: Path) -> None:
    module, tensors = pooled(Mixed), source()
    write_file(tmp_path / "model.safetensors", tensors, padding=3)
    cumem.load_into(module, tmp_path, name_map=views(module))  # takes memory for columns, once
    with torch.no_grad():
        for tensor in module.parameters():
            tensor.zero_()
    flat, before = state(), streamed()
    loaded = cumem.load_into(module, tmp_path, name_map=views(module))
    assert loaded.tensors == len(tensors)
    expect(module, tensors)
    assert state() == flat
    names = [name for name in AS_THEY_ARE if name != "head"]
    assert streamed() - before == bytes_in(tensors, *names)
    assert cumem.stats().host_bytes <= 64 * KIB


def test_one_tensor_may_be_streamed_to_some_places_and_copied_to_others(tmp_path: Path) -> None:
    """One of the file's tensors: rows to one module, to another in its type, columns to a third."""
    module = pooled(
        lambda: nn.ParameterDict(
            {
                "rows": torch.zeros(20, WIDTH),
                "row": torch.zeros(1, 7),
                "shorter": torch.zeros(ROWS - 20, WIDTH, dtype=torch.float16),
                "columns": torch.zeros(ROWS, 5),
            }
        )
    )
    with outside_scopes():
        whole = torch.randn(ROWS, WIDTH)
    write_file(tmp_path / "model.safetensors", {"whole": whole})
    before = streamed()
    parts = [
        (module["rows"], slice(0, 20)),
        (module["shorter"], slice(20, None)),
        (module["columns"], (slice(None), slice(3, 8))),
        (module["row"], (slice(5, 6), slice(2, 9))),
    ]
    cumem.load_into(module, tmp_path, name_map={"whole": parts})
    assert streamed() - before == (20 * WIDTH + 7) * 4
    with outside_scopes():
        for name, part in (
            ("rows", whole[:20]),
            ("shorter", whole[20:].half()),
            ("columns", whole[:, 3:8]),
            ("row", whole[5:6, 2:9]),
        ):
            assert torch.equal(module[name].detach().cpu(), part), name


def test_memory_that_is_not_cumems_is_copied_to_as_before(tmp_path: Path) -> None:
    module = nn.ModuleList([nn.Linear(30, 30), pooled(lambda: nn.Linear(30, 30))])
    tensors = weights_of(module)
    before = streamed()
    cumem.load_into(module, write_file(tmp_path / "model.safetensors", tensors))
    assert holds(module, tensors)
    assert streamed() - before == bytes_in(tensors, "1.weight", "1.bias")


@pytest.mark.machine(devices=2)
def test_shards_are_streamed_one_after_the_other_to_their_devices(tmp_path: Path) -> None:
    tensors = {f"t{at}": host_tensor(torch.int32, (5000 + at,), at) for at in range(8)}
    shards = {
        f"{at}.safetensors": {name: tensors[name] for name in list(tensors)[at::3]}
        for at in range(3)
    }
    module = nn.Module()
    for at, (name, tensor) in enumerate(tensors.items()):
        (tmp_path / "one").mkdir(exist_ok=True)
        path = write_file(tmp_path / "one" / name, {name: tensor})
        module.register_buffer(name, cumem.load_file(path, device=at % 2)[name].zero_())
    before = streamed()
    cumem.load_into(module, write_shards(tmp_path, shards))
    assert streamed() - before == bytes_in(tensors, *tensors)
    assert all(same_bytes(getattr(module, name), tensor) for name, tensor in tensors.items())


def test_a_snapshot_is_streamed_too(tmp_path: Path) -> None:
    module, fresh = linear(), linear()
    cumem.save_snapshot(tmp_path / "state", module)
    before = streamed()
    restored = cumem.restore_snapshot(tmp_path / "state", fresh)
    assert streamed() - before == restored.bytes
    assert bytes_of(fresh) == bytes_of(module)


def test_a_host_without_room_for_the_ring_still_loads(tmp_path: Path) -> None:
    module = linear()
    tensors = weights_of(module)
    path = write_file(tmp_path / "model.safetensors", tensors)
    cumem.configure(cumem.Options(host_limit_bytes=1000))
    before = streamed()
    cumem.load_into(module, path)
    assert streamed() == before
    assert holds(module, tensors)


def test_contents_that_were_streamed_sleep_and_autograd_notices_the_write(tmp_path: Path) -> None:
    module = linear()
    path = write_file(tmp_path / "model.safetensors", weights_of(module))
    cumem.mark_clean(module)
    cumem.sleep()
    cumem.wake_up()
    versions = [tensor._version for tensor in module.parameters()]
    cumem.load_into(module, path)
    assert all(
        tensor._version > version
        for tensor, version in zip(module.parameters(), versions, strict=True)
    )
    cumem.sleep()
    cumem.wake_up()
    assert holds(module, weights_of(module))


# In order with others


@pytest.mark.needs("slow work on request")
def test_work_that_was_pending_comes_first_and_a_sleep_meanwhile_is_refused(
    driver: DriverUnderTest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = linear()
    tensors = weights_of(module)
    path = write_file(tmp_path / "model.safetensors", tensors)
    started, real = threading.Event(), _streaming.held_file

    def held(*arguments: Any) -> Any:
        started.set()
        return real(*arguments)

    monkeypatch.setattr(_streaming, "held_file", held)
    late = bytes(160_000)
    driver.emulator.enqueue(write=(module[0].weight.data_ptr(), late), delay=0.5)

    def sleep_meanwhile() -> None:
        assert started.wait(30)
        with pytest.raises(cumem.BusyError, match="weights"):
            cumem.sleep()

    with ThreadPoolExecutor(1) as executor:
        refused = executor.submit(sleep_meanwhile)
        cumem.load_into(module, path)
        refused.result(timeout=60)
    assert holds(module, tensors)
    assert cumem.sleep().offloaded_bytes > 0
    cumem.wake_up()


@pytest.mark.needs("captures on request")
def test_a_capture_is_not_disturbed(driver: DriverUnderTest, tmp_path: Path) -> None:
    module = linear()
    path, before = write_file(tmp_path / "model.safetensors", weights_of(module)), bytes_of(module)
    driver.emulator.begin_capture()
    with pytest.raises(cumem.BusyError, match="load_into: a CUDA graph capture is under way"):
        cumem.load_into(module, path)
    driver.emulator.end_capture()
    assert bytes_of(module) == before


# What fails


def test_a_file_that_shrinks_or_changes_while_it_is_streamed_says_what_was_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first shard comes whole, the second fails."""
    module = linear(2)
    tensors = weights_of(module)
    names = list(tensors)
    shards = {
        f"{at}.safetensors": {name: tensors[name] for name in names[2 * at : 2 * at + 2]}
        for at in range(2)
    }
    folder, flat, real = write_shards(tmp_path, shards), state(), _streaming.held_file
    second = folder / "1.safetensors"
    whole = second.read_bytes()

    def failing(change: Callable[[], object], match: str) -> None:
        def held(header: Any, left: str) -> Any:
            held_open = real(header, left)
            if header.path == second:
                change()
            return held_open

        monkeypatch.setattr(_streaming, "held_file", held)
        with pytest.raises(cumem.CheckpointError, match=match) as caught:
            cumem.load_into(module, folder)
        assert str(second) in str(caught.value)
        left = "2 of 4 tensors were written and are whole; the others are undefined now: load again"
        assert left in str(caught.value)
        assert all(same_bytes(module.state_dict()[name], tensors[name]) for name in names[:2])
        assert state() == flat
        assert not cumem.is_sleeping()
        second.write_bytes(whole)

    failing(lambda: os.truncate(second, 20_000), "cut short")
    failing(lambda: os.utime(second, (1, 1)), "has changed")
    monkeypatch.setattr(_streaming, "held_file", real)
    cumem.load_into(module, folder)
    assert holds(module, tensors)


def test_a_file_that_is_another_than_its_header_said_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = linear(1)
    path = write_file(tmp_path / "model.safetensors", weights_of(module))
    before, real = bytes_of(module), _streaming.held_file

    def held(*arguments: Any) -> Any:
        write_file(path, {"other": host_tensor(torch.uint8, (10,), 0)})
        return real(*arguments)

    monkeypatch.setattr(_streaming, "held_file", held)
    with pytest.raises(cumem.CheckpointError, match=r"changed while it was read.*0 of 2 tensors"):
        cumem.load_into(module, path)
    assert bytes_of(module) == before


@pytest.mark.parametrize("nth", [1, 2])
@pytest.mark.parametrize(
    "call",
    [
        *("cuEventCreate", "cuEventRecord", "cuEventSynchronize", "cuMemcpyHtoDAsync"),
        *("cuCtxPushCurrent", "cuCtxSynchronize"),
    ],
)
@pytest.mark.needs("failures on request")
def test_a_refusal_of_the_driver_leaves_the_module_awake_and_can_be_repeated(
    driver: DriverUnderTest, tmp_path: Path, call: str, nth: int
) -> None:
    module = linear(2)
    tensors = weights_of(module)
    names = list(tensors)
    shards = {f"{at}.safetensors": {n: tensors[n] for n in names[at::2]} for at in range(2)}
    folder = write_shards(tmp_path, shards)
    cumem.load_into(module, folder)  # what a device makes once is there
    flat = state()
    # The first context is pushed to ask for a capture: unanswered, there is none.
    asked = 1 if call == "cuCtxPushCurrent" else 0
    driver.emulator.fail(call, nth=asked + nth, code="CUDA_ERROR_UNKNOWN")
    with pytest.raises(cumem.DriverError, match=rf"load_into: {call}.*[02] of 4 tensors were wr"):
        cumem.load_into(module, folder)
    driver.emulator.clear()
    assert state() == flat
    assert not cumem.is_sleeping()
    cumem.check()
    cumem.load_into(module, folder)
    assert holds(module, tensors)


# Progress


def test_progress_counts_what_is_streamed_and_what_is_converted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = []

    class Bar:
        """Stands in for tqdm's."""

        def __init__(self, *, total: int, **settings: object) -> None:
            self.total, self.n, self.disable = total, 0, settings["disable"]
            made.append(self)

        def update(self, step: int) -> None:
            self.n += step

        def __enter__(self) -> Bar:
            return self

        def __exit__(self, *error: object) -> None: ...

    class Module:
        tqdm = Bar

    original = importlib.import_module
    monkeypatch.setattr(
        importlib, "import_module", lambda name: Module if name == "tqdm" else original(name)
    )
    module, tensors = pooled(Mixed), source()
    write_file(tmp_path / "model.safetensors", tensors)
    cumem.load_into(module, tmp_path, name_map=views(module))
    (bar,) = made
    assert bar.disable is None  # asks whether it is a terminal
    assert bar.n == bar.total == bytes_in(tensors, *tensors) - tensors["head"].nbytes


def test_two_threads_may_load_at_once(tmp_path: Path) -> None:
    one, other = linear(2), linear(2)
    tensors = weights_of(one)
    path = write_file(tmp_path / "model.safetensors", tensors)
    with ThreadPoolExecutor(2) as executor:
        loads = [executor.submit(cumem.load_into, module, path) for module in (one, other)]
        assert [load.result(timeout=60).tensors for load in loads] == [4, 4]
    assert holds(one, tensors)
    assert holds(other, tensors)
    assert cumem.stats().host_bytes <= MIB
