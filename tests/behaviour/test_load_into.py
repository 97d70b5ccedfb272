"""Does a checkpoint fill the module that is there, whatever its layout, and take nothing for it?"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from support import GRANULE, DriverUnderTest, contents_of, outside_scopes, pointers, state
from torch import nn

import cumem

ROWS, WIDTH = 48, 40  # rows of 160 bytes in float32: no multiple of the smallest staging


def numbers(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Small whole numbers that depend on the position: every float type holds them exactly."""
    with outside_scopes():
        count = int(torch.Size(shape).numel())
        drawn = contents_of(torch.empty(count, dtype=torch.uint8), seed)
        return (drawn % 64).to(dtype).view(shape)


def holds(tensor: torch.Tensor, expected: torch.Tensor) -> bool:
    with outside_scopes():
        return torch.equal(tensor.detach().cpu(), expected.to(tensor.dtype))


def pooled(make: Any) -> Any:
    with cumem.use_memory_pool("weights"), cumem.default_device():
        return make()


def fused() -> nn.Module:
    """Queries, keys and values in one parameter, and two matrices side by side in another."""
    module = nn.Module()
    module.qkv = nn.Parameter(torch.zeros(3 * ROWS, WIDTH, dtype=torch.bfloat16))
    module.sides = nn.Parameter(torch.zeros(ROWS, 2 * WIDTH, dtype=torch.float16))
    return module


FUSED = {name: numbers(ROWS, WIDTH, seed=at) for at, name in enumerate(("q", "k", "v", "gate"))}
FUSED["up"] = numbers(ROWS, WIDTH, seed=9, dtype=torch.float16)


def views(module: nn.Module) -> dict[str, torch.Tensor]:
    q, k, v = module.qkv.view(3, ROWS, WIDTH).unbind(0)
    return {"q": q, "k": k, "v": v, "gate": module.sides[:, :WIDTH], "up": module.sides[:, WIDTH:]}


def reserved() -> tuple[object, ...]:
    """All counters, and what torch has reserved."""
    devices = cumem.stats().devices
    return (*state(), [(device.mapped_bytes, device.reserved_bytes) for device in devices])


@contextmanager
def staging(bytes: int) -> Iterator[None]:
    cumem.configure(cumem.Options(staging_bytes=bytes))
    yield
    cumem.configure(cumem.Options())


@pytest.mark.parametrize("inside", [False, True], ids=["after the scope", "inside the scope"])
def test_fused_and_converted_weights_take_no_memory(tmp_path: Path, inside: bool) -> None:
    module = pooled(fused)
    save_file(FUSED, tmp_path / "model.safetensors")
    addresses = pointers(module)
    with staging(4096):
        if inside:
            with cumem.use_memory_pool("weights"):
                before = reserved()
                loaded = cumem.load_into(module, tmp_path, name_map=views(module))
                assert reserved() == before
        else:
            before = reserved()
            loaded = cumem.load_into(module, tmp_path, name_map=views(module))
            assert reserved() == before
    assert (loaded.tensors, loaded.missing, loaded.unexpected) == (5, (), ())
    for name, view in views(module).items():
        assert holds(view, FUSED[name]), name
    assert pointers(module) == addresses
    assert cumem.covered(module) == []


def test_memory_for_staging_is_bounded_and_goes_back(
    tmp_path: Path, driver: DriverUnderTest, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = pooled(lambda: nn.Linear(1000, 700, bias=False))
    expected = numbers(700, 1000)
    save_file({"weight": expected}, tmp_path / "model.safetensors")
    cumem.load_into(module, tmp_path)  # the driver makes a buffer of its own at the first copy
    before, seen, read = driver.used_bytes(), [], os.preadv

    def watched(descriptor: int, buffers: list[memoryview], offset: int) -> int:
        seen.append((len(buffers[0]), driver.used_bytes() - before))
        return read(descriptor, buffers, offset)

    monkeypatch.setattr(os, "preadv", watched)
    transposed = {"weight": module.weight.t().unflatten(0, (10, 100))}
    source = {"weight": expected.t().reshape(10, 100, 700).contiguous()}
    save_file(source, tmp_path / "model.safetensors")
    with staging(100_000):
        cumem.load_into(module, tmp_path, name_map=transposed)
    assert holds(module.weight, expected)
    assert len(seen) >= 28
    assert max(size for size, _ in seen) <= 100_000
    assert max(taken for _, taken in seen) == GRANULE
    assert driver.used_bytes() == before


def test_without_room_for_staging_nothing_is_written(
    tmp_path: Path, driver: DriverUnderTest
) -> None:
    module = pooled(fused)
    save_file(FUSED, tmp_path / "model.safetensors")
    with driver.another_tenant(leaves=0), pytest.raises(cumem.DeviceOutOfMemoryError):
        cumem.load_into(module, tmp_path, name_map=views(module))
    assert not module.qkv.any()
    assert not module.sides.any()
    cumem.load_into(module, tmp_path, name_map=views(module))
    assert holds(views(module)["up"], FUSED["up"])


def test_callable_gets_the_name_and_the_source(tmp_path: Path) -> None:
    """One tensor of the file fills three modules, each with its rows and one more with columns."""
    module = pooled(
        lambda: nn.ModuleDict({n: nn.Linear(WIDTH, ROWS, bias=False) for n in ("q", "k", "v")})
    )
    module["corner"] = pooled(lambda: nn.Linear(7, 5, bias=False))
    whole = numbers(3 * ROWS, WIDTH)
    save_file({"qkv": whole}, tmp_path / "model.safetensors")
    asked = []

    def split(name: str, source: Any) -> Any:
        asked.append((name, source.shape, source.dtype))
        parts = [
            (module[n].weight, slice(i * ROWS, (i + 1) * ROWS)) for i, n in enumerate(("q", "k"))
        ]
        corner = (module["corner"].weight, (slice(3, 8), slice(-7, None)))
        return [*parts, (module["v"].weight, slice(2 * ROWS, None)), corner]

    with staging(4096):
        cumem.load_into(module, tmp_path, name_map=split)
    assert asked == [("qkv", (3 * ROWS, WIDTH), "F32")]
    for at, name in enumerate(("q", "k", "v")):
        assert holds(module[name].weight, whole[at * ROWS : (at + 1) * ROWS]), name
    assert holds(module["corner"].weight, whole[3:8, -7:])


def test_part_that_nothing_fills_is_missing_and_nothing_is_written(tmp_path: Path) -> None:
    module = pooled(fused)
    save_file({name: FUSED[name] for name in ("q", "v", "up")}, tmp_path / "model.safetensors")
    before = module.qkv.detach().clone()
    with pytest.raises(cumem.CheckpointError) as caught:
        cumem.load_into(module, tmp_path, name_map=views(module))
    parts = (
        f"qkv ({ROWS * WIDTH} of {3 * ROWS * WIDTH} elements, from [48, 0] to [95, 39])",
        f"sides ({ROWS * WIDTH} of {2 * ROWS * WIDTH} elements, from [0, 0] to [47, 39])",
    )
    assert f"2 missing: {parts[0]}, {parts[1]}" in str(caught.value)
    assert torch.equal(module.qkv, before)
    loaded = cumem.load_into(module, tmp_path, name_map=views(module), strict=False)
    assert loaded.missing == parts
    assert holds(views(module)["v"], FUSED["v"])


def test_without_strict_other_faults_are_still_refused(tmp_path: Path) -> None:
    module = pooled(lambda: nn.Linear(2, 3))
    save_file({"weight": numbers(3, 3), "more": numbers(1)}, tmp_path / "model.safetensors")
    with pytest.raises(cumem.CheckpointError, match=r"another shape: weight \(\[3, 3\] in the f"):
        cumem.load_into(module, tmp_path, strict=False)
    save_file({"weight": numbers(3, 2), "more": numbers(1)}, tmp_path / "model.safetensors")
    loaded = cumem.load_into(module, tmp_path, strict=False)
    assert (loaded.tensors, loaded.missing, loaded.unexpected) == (1, ("bias",), ("more",))


def test_memory_that_would_be_written_twice_or_is_not_the_modules_is_refused(
    tmp_path: Path,
) -> None:
    module = pooled(fused)
    save_file(FUSED, tmp_path / "model.safetensors")
    known = views(module)
    foreign = torch.zeros(ROWS, WIDTH)
    wrong = {**known, "k": module.qkv[10 : 10 + ROWS], "gate": module.sides[:, 20 : 20 + WIDTH]}
    wrong["v"] = foreign
    with pytest.raises(cumem.CheckpointError) as caught:
        cumem.load_into(module, tmp_path, name_map=wrong)
    assert "1 mapped to memory that is not the module's: v" in str(caught.value)
    assert "2 written twice: " in str(caught.value)
    assert "q and k to qkv" in str(caught.value)
    assert "gate and up to sides" in str(caught.value)
    row = {**known, "q": module.qkv[:1].expand(ROWS, WIDTH)}
    with pytest.raises(cumem.CheckpointError, match="twice: overlapping parts of q to qkv"):
        cumem.load_into(module, tmp_path, name_map=row)
    assert not module.qkv.any()
    assert not module.sides.any()


def test_columns_that_interleave_are_told_from_columns_that_meet(tmp_path: Path) -> None:
    module = pooled(lambda: nn.Linear(2 * WIDTH, ROWS, bias=False))
    even, odd = module.weight[:, 0::2], module.weight[:, 1::2]
    save_file({n: FUSED[n] for n in ("q", "k")}, tmp_path / "model.safetensors")
    cumem.load_into(module, tmp_path, name_map={"q": even, "k": odd})
    assert holds(even, FUSED["q"])
    assert holds(odd, FUSED["k"])
    with pytest.raises(cumem.CheckpointError, match=r"missing: weight \(1920 of 3840 elements, f"):
        cumem.load_into(module, tmp_path, name_map={"q": even, "k": None})


@pytest.mark.parametrize("answer", [7, [], [("weight", slice(1))], (torch.ones(1), (1, 2))])
def test_answer_that_is_none_is_an_error_that_names_the_tensor(tmp_path: Path, answer: Any) -> None:
    module = pooled(lambda: nn.Linear(2, 3))
    save_file({"weight": numbers(3, 2)}, tmp_path / "model.safetensors")
    with pytest.raises(TypeError, match=r"name_map must answer with a name.* for 'weight' it"):
        cumem.load_into(module, tmp_path, name_map=lambda name, source: answer)
    for slices in (slice(0, 3, 2), (slice(1), slice(1), slice(1))):
        with pytest.raises(TypeError, match=r"name_map: .*slices .*'weight'"):
            cumem.load_into(module, tmp_path, name_map={"weight": (module.weight, slices)})
    with pytest.raises(TypeError, match="expected a module, not dict"):
        cumem.load_into({}, tmp_path)


@pytest.mark.parametrize("slices", [1, None, [slice(1)]])
def test_slices_that_are_none_are_told_as_such(tmp_path: Path, slices: Any) -> None:
    module = pooled(lambda: nn.Linear(2, 3, bias=False))
    save_file({"weight": numbers(3, 2)}, tmp_path / "model.safetensors")
    with pytest.raises(TypeError, match=r"slices for 'weight' must be a slice or a tuple of"):
        cumem.load_into(module, tmp_path, name_map={"weight": (module.weight, slices)})


def test_file_that_fails_while_it_is_read_says_what_was_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = pooled(lambda: nn.Linear(100, 100))
    file = tmp_path / "model.safetensors"
    converted = {"weight": numbers(100, 100), "bias": numbers(100, seed=1)}
    save_file({name: tensor.double() for name, tensor in converted.items()}, file)
    read = os.preadv

    def failing(descriptor: int, buffers: list[memoryview], offset: int) -> int:
        if len(buffers[0]) > 800:
            raise OSError(5, "Input/output error")
        return read(descriptor, buffers, offset)

    with monkeypatch.context() as patch:
        patch.setattr(os, "preadv", failing)
        with pytest.raises(cumem.CheckpointError, match=r"Input/output error.*1 of 2 tensors were"):
            cumem.load_into(module, tmp_path)
    assert holds(module.bias, numbers(100, seed=1))
    monkeypatch.setattr(os, "preadv", lambda *a: os.truncate(file, 500) or read(*a))
    with pytest.raises(cumem.CheckpointError, match=r"it ends at byte .*0 of 2 tensors were"):
        cumem.load_into(module, tmp_path)
