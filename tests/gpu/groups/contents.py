"""Do contents come back bit for bit, whatever their type, size and shape?"""

from __future__ import annotations

import itertools
import warnings

import torch
from harness import note, run
from support import (
    CUDA,
    DEVICE,
    KIB,
    MIB,
    addresses,
    expected_bytes,
    fill,
    holds,
    intact,
    make,
    raw,
    scaled,
    synchronize,
)

import cumem

TYPES = (
    "bool uint8 int8 uint16 int16 uint32 int32 uint64 int64 float16 bfloat16 float32 float64 "
    "complex32 complex64 complex128 float8_e4m3fn float8_e5m2 float8_e4m3fnuz float8_e5m2fnuz "
    "float8_e8m0fnu"
)
ODD = (
    *(0, 1, 3, 511, 512, 513),
    *(size + step for size in (KIB, MIB, 2 * MIB, 10 * MIB, 20 * MIB) for step in (-1, 0, 1)),
)
TINY = 5000


def cycle(times: int = 1) -> None:
    for _ in range(times):
        cumem.sleep()
        cumem.wake_up()


def every_type() -> None:
    types = [getattr(torch, name) for name in TYPES.split() if hasattr(torch, name)]
    with cumem.use_memory_pool("weights"), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # complex32 is experimental
        tensors = [torch.empty(257, 31, dtype=kind, device=DEVICE) for kind in types]
    for seed, tensor in enumerate(tensors):
        fill(tensor, seed)
    where = addresses(tensors)
    cycle(2)
    assert addresses(tensors) == where
    wrong = [tensor.dtype for seed, tensor in enumerate(tensors) if not holds(tensor, seed)]
    assert not wrong, wrong
    note(f"{len(types)} types")


def odd_sizes() -> None:
    big = (scaled(256 * MIB) - 1, scaled(256 * MIB) + 1, scaled(600 * MIB) + 7)
    tensors = make("weights", (*ODD, *big))
    where = addresses(tensors)
    cycle(2)
    assert addresses(tensors) == where
    assert intact(tensors)


def thousands_of_tiny_tensors() -> None:
    sizes = [1 + 37 * number % 4000 for number in range(TINY)]
    with cumem.use_memory_pool("weights"):
        tensors = [torch.empty(size, dtype=torch.uint8, device=DEVICE) for size in sizes]
    longest = torch.frombuffer(bytearray(expected_bytes(8000, 11)), dtype=torch.uint8).to(DEVICE)
    for start, tensor in enumerate(tensors):
        tensor.copy_(longest[start % 4000 : start % 4000 + tensor.numel()])
    cycle(3)
    wrong = [
        start
        for start, tensor in enumerate(tensors)
        if not torch.equal(tensor, longest[start % 4000 : start % 4000 + tensor.numel()])
    ]
    assert not wrong, wrong[:10]
    synchronize()


def one_small_scale_beside_large_tensors() -> None:
    with cumem.use_memory_pool("weights"):
        large = torch.empty(30 * MIB, dtype=torch.uint8, device=DEVICE)
        scale = torch.full((), 0.0031, device=DEVICE)
    fill(large, 1)
    before = scale.item()
    cycle(3)
    assert scale.item() == before
    assert holds(large, 1)


class Model(torch.nn.Module):
    """Parameters, buffers of both kinds, tied weights and a view."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = torch.nn.Embedding(1000, 256)
        self.layers = torch.nn.Sequential(
            torch.nn.Linear(256, 1024), torch.nn.BatchNorm1d(1024), torch.nn.Linear(1024, 256)
        )
        self.head = torch.nn.Linear(256, 1000, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("table", torch.randn(64, 64), persistent=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        scores: torch.Tensor = self.head(self.layers(self.embed(tokens)))
        return scores


def a_module_with_buffers_and_tied_weights() -> None:
    with cumem.use_memory_pool("weights"):
        model = Model()
        if CUDA:
            model = model.to(DEVICE)
    assert cumem.covered(model, "weights") == []
    model.eval()
    tokens = torch.arange(500, device=DEVICE)
    with torch.no_grad():
        right = model(tokens)
    state = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    table = model.get_buffer("table").clone()
    where = addresses([*model.parameters(), *model.buffers()])
    cycle(3)
    assert addresses([*model.parameters(), *model.buffers()]) == where
    assert model.head.weight.data_ptr() == model.embed.weight.data_ptr()
    assert all(torch.equal(model.state_dict()[name], known) for name, known in state.items())
    assert torch.equal(model.get_buffer("table"), table)
    with torch.no_grad():
        assert torch.equal(model(tokens), right)


def a_module_trains_on_after_wake() -> None:
    with cumem.use_memory_pool("weights"):
        layer = torch.nn.Linear(256, 256)
        if CUDA:
            layer = layer.to(DEVICE)
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
    x = torch.randn(32, 256, device=DEVICE)
    losses = []
    for _ in range(4):
        optimizer.zero_grad()
        loss = (layer(x) - x).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
        cycle()
    assert losses == sorted(losses, reverse=True), losses


def tags_sleep_and_wake_in_every_order() -> None:
    tags = ("weights", "adapters", "tables")
    made = {tag: make(tag, [KIB, 3 * MIB, 30 * MIB]) for tag in tags}
    orders = list(itertools.permutations(tags))
    for down, up in zip(orders, reversed(orders), strict=True):
        for number, tag in enumerate(down):
            cumem.sleep(tags=[tag])
            assert cumem.sleeping_tags() == set(down[: number + 1])
        for number, tag in enumerate(up):
            cumem.wake_up([tag])
            assert cumem.sleeping_tags() == set(up[number + 1 :])
            assert intact(made[tag])
    assert not cumem.is_sleeping()


def kept_tensors_survive_every_level() -> None:
    cache = make("kv_cache", [30 * MIB, 4 * KIB])
    weights = make("weights", [30 * MIB, 4 * KIB])
    cumem.keep([cache[1], {"deep": weights[1]}])
    report = cumem.sleep(level=2)
    assert report.discarded_bytes >= 60 * MIB
    woken = cumem.wake_up(fill="poison")
    assert woken.undefined == {"kv_cache", "weights"}
    assert holds(cache[1], 1)
    assert holds(weights[1], 1)
    assert raw(cache[0]).eq(0xFF).all()
    assert raw(weights[0]).eq(0xFF).all()


def discarded_memory_can_be_filled() -> None:
    cache = make("kv_cache", [30 * MIB + 1])[0]
    before = cumem.epoch("kv_cache")
    cumem.sleep()
    cumem.wake_up(fill="zero")
    assert raw(cache).eq(0).all()
    assert cumem.epoch("kv_cache") == before + 1


def new_memory_is_never_put_into_a_sleeping_segment() -> None:
    first = make("weights", [5 * MIB, KIB])
    cumem.sleep()
    second = make("weights", [5 * MIB, KIB])  # the first pool's segments have room
    assert all(cumem.is_mapped(tensor) for tensor in second)
    assert intact(second)
    cumem.wake_up()
    assert intact(first)
    assert intact(second)


if __name__ == "__main__":
    run(
        [
            every_type,
            odd_sizes,
            thousands_of_tiny_tensors,
            one_small_scale_beside_large_tensors,
            a_module_with_buffers_and_tied_weights,
            a_module_trains_on_after_wake,
            tags_sleep_and_wake_in_every_order,
            kept_tensors_survive_every_level,
            discarded_memory_can_be_filled,
            new_memory_is_never_put_into_a_sleeping_segment,
        ]
    )
