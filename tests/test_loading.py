"""Is a checkpoint copied into memory that exists, whole and in place, or not at all?"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from test_safetensors import tensor, write
from torch import nn

import cumem
from cumem.loading import load_into
from cumem.testing import emulated_driver


class Tied(nn.Module):
    """Two names for one weight, a buffer in the state dict and one outside of it."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(5, 3)
        self.head = nn.Linear(3, 5, bias=False)
        self.head.weight = self.embedding.weight
        self.register_buffer("scale", torch.zeros(()))
        self.register_buffer("table", torch.zeros(4), persistent=False)


def contents_of(module: nn.Module) -> dict[str, bytes]:
    return {name: bytes(value.untyped_storage()) for name, value in module.state_dict().items()}


def numbers(*shape: int, start: float = 1) -> torch.Tensor:
    count = int(torch.Size(shape).numel())
    return torch.arange(start, start + count, dtype=torch.float32).view(shape)


def test_weights_are_copied_in_place_under_any_of_their_names(tmp_path: Path) -> None:
    for name in ("embedding.weight", "head.weight"):
        module = Tied()
        address = module.head.weight.data_ptr()
        save_file({name: numbers(5, 3), "scale": torch.tensor(7.0)}, tmp_path / "model.safetensors")
        loaded = load_into(module, tmp_path)
        assert (loaded.tensors, loaded.bytes, loaded.files) == (2, 64, 1)
        assert torch.equal(module.embedding.weight, numbers(5, 3))
        assert module.head.weight is module.embedding.weight
        assert module.head.weight.data_ptr() == address
        assert module.get_buffer("scale") == 7


def test_buffer_outside_the_state_dict_is_filled_when_it_is_there(tmp_path: Path) -> None:
    module = Tied()
    tensors = {"head.weight": numbers(5, 3), "scale": torch.tensor(7.0), "table": numbers(4)}
    save_file(tensors, tmp_path / "model.safetensors")
    load_into(module, tmp_path)
    assert torch.equal(module.get_buffer("table"), numbers(4))


def test_everything_that_does_not_fit_is_said_at_once_and_nothing_is_written(
    tmp_path: Path,
) -> None:
    module = nn.ModuleDict({"one": nn.Linear(2, 3), "two": nn.Linear(2, 3), "three": Tied()})
    before = contents_of(module)
    save_file(
        {
            "one.weight": numbers(2, 3),
            "one.bias": torch.ones(3, dtype=torch.int32),
            "two.weight": numbers(3, 2),
            "extra": numbers(1),
            "three.scale": torch.tensor(7.0),
        },
        tmp_path / "model.safetensors",
    )
    with pytest.raises(cumem.CheckpointError) as caught:
        load_into(module, tmp_path)
    for part in (
        "does not fit this ModuleDict",
        "1 unexpected: extra",
        "1 of another shape: one.weight ([2, 3] in the file, [3, 2] in the module)",
        "1 of another type: one.bias (I32 in the file, torch.float32 in the module)",
        "3 missing: two.bias, three.embedding.weight, three.head.weight",
    ):
        assert part in str(caught.value)
    assert contents_of(module) == before


def test_message_about_very_many_names_stays_readable(tmp_path: Path) -> None:
    save_file({f"layer.{i}": numbers(1) for i in range(500)}, tmp_path / "model.safetensors")
    with pytest.raises(cumem.CheckpointError, match=r"500 unexpected: .* and 480 more"):
        load_into(nn.Linear(1, 1), tmp_path)


def test_tied_names_that_disagree_are_refused(tmp_path: Path) -> None:
    module = Tied()
    before = contents_of(module)
    file = tmp_path / "model.safetensors"
    scale = torch.tensor(7.0)
    save_file(
        {"embedding.weight": numbers(5, 3), "head.weight": numbers(5, 3), "scale": scale}, file
    )
    load_into(Tied(), file)
    changed = numbers(5, 3, start=2)
    save_file({"embedding.weight": numbers(5, 3), "head.weight": changed, "scale": scale}, file)
    with pytest.raises(cumem.CheckpointError, match=r"embedding\.weight and head\.weight are one"):
        load_into(module, file)
    assert contents_of(module) == before


def test_names_are_mapped_and_left_out_as_asked(tmp_path: Path) -> None:
    save_file({"w": numbers(1, 2), "b": numbers(1), "old": numbers(9)}, tmp_path / "x.safetensors")
    names = {"w": "weight", "b": "bias"}
    module = nn.Linear(2, 1)
    load_into(module, tmp_path, name_map=lambda name, source: names.get(name))
    assert torch.equal(module.bias, numbers(1))
    load_into(module, tmp_path, name_map={**names, "old": None})
    assert torch.equal(module.weight, numbers(1, 2))
    with pytest.raises(cumem.CheckpointError, match="2 written twice: b and old to weight"):
        load_into(module, tmp_path, name_map=lambda name, source: "weight")
    with pytest.raises(cumem.CheckpointError, match=r"2 unexpected: b \(as offset\), old"):
        load_into(module, tmp_path, name_map={"w": "weight", "b": "offset"})


def test_float_types_are_converted_and_others_come_bit_for_bit(tmp_path: Path) -> None:
    kinds = (torch.float16, torch.bfloat16, torch.float64, torch.int64, torch.uint8, torch.bool)
    kinds += (torch.complex64, torch.float8_e4m3fn, torch.float8_e5m2, torch.uint16)
    bits = torch.arange(16, dtype=torch.uint8) % 2
    values = {f"t{i}": bits.view(kind).clone() for i, kind in enumerate(kinds)}
    save_file({**values, "wide": numbers(2)}, tmp_path / "x.safetensors")
    module = nn.Module()
    for name, value in values.items():
        module.register_buffer(name, torch.zeros_like(value))
    module.register_buffer("wide", torch.zeros(2, dtype=torch.bfloat16))
    load_into(module, tmp_path)
    for name, value in values.items():
        assert torch.equal(module.get_buffer(name).view(torch.uint8), bits), (name, value.dtype)
    assert torch.equal(module.get_buffer("wide"), numbers(2).bfloat16())


def test_types_that_torch_does_not_have_and_packed_ones_are_told_apart(tmp_path: Path) -> None:
    module = nn.Module()
    module.register_buffer("a", torch.zeros(4, dtype=torch.uint8).view(torch.float4_e2m1fn_x2))
    load_into(module, write(tmp_path / "four", {"a": tensor(0, 4, "F4", [8])}, payload=4))
    assert module.get_buffer("a").view(torch.uint8).tolist() == [0, 1, 2, 3]
    six = write(tmp_path / "six", {"a": tensor(0, 3, "F6_E2M3", [4])}, payload=3)
    with pytest.raises(cumem.CheckpointError, match=r"another type: a \(F6_E2M3 in the file"):
        load_into(module, six)


def test_module_without_memory_is_refused(tmp_path: Path) -> None:
    save_file({"weight": numbers(1, 2), "bias": numbers(1)}, tmp_path / "x.safetensors")
    with torch.device("meta"):
        module = nn.Linear(2, 1)
    with pytest.raises(cumem.CheckpointError, match=r"2 without memory .*: bias, weight"):
        load_into(module, tmp_path)


def test_parameters_made_in_inference_mode_are_filled(tmp_path: Path) -> None:
    save_file({"weight": numbers(1, 2), "bias": numbers(1)}, tmp_path / "x.safetensors")
    with torch.inference_mode():
        module = nn.Linear(2, 1)
    load_into(module, tmp_path)
    assert torch.equal(module.weight, numbers(1, 2))


def test_sleeping_module_is_refused_and_is_filled_once_it_is_awake(tmp_path: Path) -> None:
    save_file({"weight": numbers(1, 2), "bias": numbers(1)}, tmp_path / "x.safetensors")
    with emulated_driver(capacity_bytes=64 << 20):
        with cumem.use_memory_pool("weights"):
            module = nn.Linear(2, 1)
        cumem.sleep(level=2)
        with pytest.raises(cumem.AsleepError, match=r"asleep: bias, weight\. Nothing was changed"):
            load_into(module, tmp_path)
        cumem.wake_up()
        load_into(module, tmp_path)
        assert torch.equal(module.weight, numbers(1, 2))
        assert cumem.covered(module) == []
        del module
