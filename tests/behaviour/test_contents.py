"""Do pointers stay, and do bytes come back, whatever is stored and how?"""

from __future__ import annotations

import pytest
import torch
from support import (
    GRANULE,
    MIB,
    DriverUnderTest,
    fill_pattern,
    holds_pattern,
    host_bytes_of,
    make,
    make_as,
    named_tensors,
    pointers,
    same_bytes,
    tag_stats,
)

import cumem

DTYPES = [
    *(torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.bool),
    *(torch.uint16, torch.uint32, torch.uint64),
    *(torch.float16, torch.bfloat16, torch.float32, torch.float64),
    *(torch.complex32, torch.complex64, torch.complex128),
    *(torch.float8_e4m3fn, torch.float8_e4m3fnuz, torch.float8_e5m2, torch.float8_e5m2fnuz),
    *(torch.float8_e8m0fnu, torch.float4_e2m1fn_x2),
]
SIZES = [
    *(1, 2, 3, 511, 512, 513, 4095),
    *(MIB - 1, MIB, MIB + 1),
    *(GRANULE - 1, GRANULE, GRANULE + 1),
    *(10 * MIB - 1, 10 * MIB, 11 * MIB + 7),
]


@pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental")
@pytest.mark.parametrize("dtype", DTYPES, ids=lambda dtype: str(dtype).removeprefix("torch."))
def test_every_dtype_comes_back_bit_for_bit_at_the_same_address(dtype: torch.dtype) -> None:
    with cumem.use_memory_pool("weights"):
        tensor = make_as(dtype, (37, 11), seed=1)
        scalar = make_as(dtype, (), seed=2)
    before = (tensor.data_ptr(), scalar.data_ptr())
    cumem.sleep()
    cumem.wake_up()
    assert (tensor.data_ptr(), scalar.data_ptr()) == before
    assert (tensor.dtype, tensor.shape, tensor.stride()) == (dtype, (37, 11), (11, 1))
    assert holds_pattern(tensor, 1)
    assert holds_pattern(scalar, 2)


@pytest.mark.parametrize("size", SIZES)
def test_every_size_comes_back_whole(size: int) -> None:
    with cumem.use_memory_pool("weights") as pool:
        tensor = make(size, seed=size)
    before = tensor.data_ptr()
    assert pool.captured_bytes >= size
    cumem.sleep()
    cumem.wake_up()
    assert tensor.data_ptr() == before
    assert holds_pattern(tensor, size)


@pytest.mark.parametrize("size", [1, GRANULE - 1, GRANULE + 1, 7 * GRANULE + 13, 24 * MIB])
def test_a_segment_of_several_chunks_comes_back_whole(size: int) -> None:
    cumem.configure(cumem.Options(chunk_bytes=GRANULE))
    with cumem.use_memory_pool("weights") as pool:
        tensor = make(size, seed=3)
    created = cumem.stats().handles_created
    before = tensor.data_ptr()
    cumem.sleep()
    cumem.check()
    cumem.wake_up()
    assert cumem.stats().handles_created - created == pool.segment_bytes // GRANULE
    assert tensor.data_ptr() == before
    assert holds_pattern(tensor, 3)


def test_a_chunk_size_may_change_between_allocations() -> None:
    tensors = []
    for index, chunk in enumerate((GRANULE, 6 * MIB, 256 * MIB)):
        cumem.configure(cumem.Options(chunk_bytes=chunk))
        with cumem.use_memory_pool("weights"):
            tensors.append(make(13 * MIB + index, seed=index))
    cumem.sleep()
    cumem.check()
    cumem.wake_up()
    assert all(holds_pattern(tensor, index) for index, tensor in enumerate(tensors))


def test_a_tensor_without_bytes_is_everywhere_and_never_in_the_way() -> None:
    with cumem.use_memory_pool("weights"):
        empty = torch.empty(0, 5, device=cumem.default_device())
        full = make(10)
    cumem.sleep()
    assert cumem.is_mapped(empty)
    assert cumem.tag_of(empty) is None
    assert empty.sum().item() == 0
    cumem.wake_up()
    assert empty.shape == (0, 5)
    assert holds_pattern(full)


def test_thousands_of_tiny_tensors_come_back() -> None:
    sizes = [1 + index * 37 % 700 for index in range(3000)]
    with cumem.use_memory_pool("weights"):
        tensors = [make(size, seed) for seed, size in enumerate(sizes)]
        del tensors[::3]
    kept = [seed for seed in range(3000) if seed % 3]
    before = [tensor.data_ptr() for tensor in tensors]
    report = cumem.sleep()
    assert report.offloaded_bytes == tag_stats("weights").live_bytes
    cumem.wake_up()
    assert [tensor.data_ptr() for tensor in tensors] == before
    assert all(holds_pattern(tensor, seed) for seed, tensor in zip(kept, tensors, strict=True))


def test_a_few_bytes_beside_a_large_tensor_come_back() -> None:
    with cumem.use_memory_pool("weights"):
        scale = torch.tensor(0.0031, device=cumem.default_device())
        large = make(30 * MIB, seed=4)
    before = host_bytes_of(scale)
    cumem.sleep()
    cumem.wake_up()
    assert same_bytes(scale, before)
    assert holds_pattern(large, 4)


def test_views_slices_and_transposes_keep_their_place() -> None:
    with cumem.use_memory_pool("weights"):
        base = make_as(torch.int32, (64, 48), seed=5)
        views = [base[3:7, 5:9], base.t(), base.view(-1)[17:], base[:, ::3], base[0, 0]]
    before = [(view.data_ptr(), view.storage_offset(), view.stride()) for view in views]
    contents = [view.cpu().clone() for view in views]
    cumem.sleep()
    assert not any(cumem.is_mapped(view) for view in views)
    cumem.wake_up()
    assert [(view.data_ptr(), view.storage_offset(), view.stride()) for view in views] == before
    for view, expected in zip(views, contents, strict=True):
        assert torch.equal(view.cpu(), expected)
    views[0].fill_(7)
    assert torch.equal(base[3:7, 5:9], views[0])


def test_a_view_keeps_the_memory_of_a_dead_base() -> None:
    with cumem.use_memory_pool("weights"):
        base = make(5000, seed=6)
        expected = host_bytes_of(base[1000:2000])
        view = base[1000:2000]
        del base
    cumem.sleep()
    cumem.wake_up()
    assert same_bytes(view, expected)


class Model(torch.nn.Module):
    """Parameters, buffers of both kinds, tied weights, and some without bytes."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = torch.nn.Embedding(100, 32)
        self.body = torch.nn.Sequential(
            torch.nn.Linear(32, 64), torch.nn.BatchNorm1d(64), torch.nn.ReLU()
        )
        self.back = torch.nn.Linear(64, 32)
        self.head = torch.nn.Linear(32, 100, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("rope", torch.arange(32.0).sin(), persistent=False)
        self.register_buffer("nothing", torch.empty(0))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.head(self.back(self.body(self.embed(tokens) + self.rope)))


def build_model() -> Model:
    torch.manual_seed(0)
    with torch.device(cumem.default_device()):
        return Model().eval()


def test_a_module_computes_the_same_bits_at_the_same_addresses() -> None:
    with cumem.use_memory_pool("weights"):
        model = build_model()
    tokens = torch.arange(0, 96, 7, device=cumem.default_device())
    with torch.no_grad():
        before, places = model(tokens), pointers(model)
        contents = {name: host_bytes_of(tensor) for name, tensor in named_tensors(model).items()}
        for _ in range(3):
            cumem.sleep()
            cumem.wake_up()
        assert pointers(model) == places
        assert torch.equal(model(tokens), before)
    for name, tensor in named_tensors(model).items():
        assert same_bytes(tensor, contents[name]), name


def test_tied_weights_stay_tied() -> None:
    with cumem.use_memory_pool("weights"):
        model = build_model()
    live = tag_stats("weights").live_bytes
    report = cumem.sleep()
    cumem.wake_up()
    assert report.offloaded_bytes == live
    assert model.head.weight is model.embed.weight
    with torch.no_grad():
        model.embed.weight[0, 0] = 42
    assert model.head.weight[0, 0].item() == 42


def test_training_goes_on_after_a_wake() -> None:
    def train(*, sleeps: bool) -> dict[str, torch.Tensor]:
        with cumem.use_memory_pool("weights"):
            model = build_model().train()
            optimizer = torch.optim.Adam(model.parameters())
        tokens = torch.arange(0, 96, 7, device=cumem.default_device())
        for _ in range(3):
            model(tokens).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            if sleeps:
                cumem.sleep()
                cumem.wake_up()
        return {name: host_bytes_of(tensor) for name, tensor in named_tensors(model).items()}

    with_sleep, without = train(sleeps=True), train(sleeps=False)
    assert all(torch.equal(with_sleep[name], without[name]) for name in without)


@pytest.mark.parametrize("cycle", range(3))
def test_contents_written_between_cycles_are_what_comes_back(cycle: int) -> None:
    with cumem.use_memory_pool("weights"):
        tensor = make(3 * MIB + 5)
    for seed in range(cycle + 2):
        fill_pattern(tensor, seed)
        cumem.sleep()
        cumem.wake_up()
        assert holds_pattern(tensor, seed)


def test_memory_dirtied_by_another_tenant_does_not_show(driver: DriverUnderTest) -> None:
    with cumem.use_memory_pool("weights"):
        first, second = make(9 * MIB, seed=7), make(100, seed=8)
    for _ in range(3):
        cumem.sleep()
        with cumem.use_memory_pool("tenant"):
            dirt = torch.full((40 * MIB,), 0xA5, dtype=torch.uint8, device=driver.device)
        del dirt
        cumem.trim("tenant")
        cumem.wake_up()
        assert holds_pattern(first, 7)
        assert holds_pattern(second, 8)


def test_inference_tensors_sleep_too() -> None:
    with torch.inference_mode(), cumem.use_memory_pool("weights"):
        tensor = make(5000, seed=9)
    with cumem.use_memory_pool("weights"), torch.inference_mode():
        other = make(5000, seed=10)
    with torch.inference_mode():
        cumem.sleep()
        cumem.wake_up()
    assert tensor.is_inference()
    assert holds_pattern(tensor, 9)
    assert holds_pattern(other, 10)


def test_memory_in_use_falls_by_what_the_report_says(driver: DriverUnderTest) -> None:
    with cumem.use_memory_pool("weights"):
        tensors = [make(size) for size in (100, 3 * MIB, 40 * MIB)]
    before = driver.used_bytes()
    report = cumem.sleep()
    assert before - driver.used_bytes() == report.freed_bytes > 0
    woke = cumem.wake_up()
    assert driver.used_bytes() == before
    assert woke.mapped_bytes == report.freed_bytes
    del tensors
