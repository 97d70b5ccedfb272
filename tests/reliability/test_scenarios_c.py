"""Public reports C: contents lost or wrong after a wake."""

from __future__ import annotations

import pytest
import torch
from support import (
    GRANULE,
    MIB,
    holds_pattern,
    host_bytes_of,
    make,
    named_tensors,
    raw,
    same_bytes,
    tag_stats,
)

import cumem


class Adapted(torch.nn.Module):
    """A layer with what a checkpoint has not: tables, scales and stacked adapters."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(64, 64)
        self.register_buffer("rope", torch.arange(64.0).sin(), persistent=False)
        self.register_buffer("count", torch.tensor(3))
        self.scale = torch.tensor(0.0031)  # a plain attribute
        self.stacked = [torch.full((4, 64), float(rank)) for rank in range(3)]
        self.index = {"map": torch.arange(10), "experts": (torch.arange(5),)}

    def plain(self) -> list[torch.Tensor]:
        return [self.scale, *self.stacked, self.index["map"], *self.index["experts"]]


def build() -> Adapted:
    with cumem.use_memory_pool("weights"), torch.device(cumem.default_device()):
        return Adapted()


def is_poison(tensor: torch.Tensor) -> bool:
    return bool((raw(tensor) == 0xFF).all())


def test_what_a_reload_does_not_bring_is_listed_before_it_is_lost() -> None:
    """C3, NeMo-RL#2631; C9, vllm#52479; C10, vllm#39934; C11, vllm-ascend#13352."""
    model = build()
    found = {tensor.data_ptr() for block in cumem.uncovered(model) for tensor in block.tensors}
    assert found == {tensor.data_ptr() for tensor in model.plain()}


def test_a_reload_after_a_full_discard_restores_all_but_what_is_listed() -> None:
    """C1, vllm#16564; C2, vllm#29341, trl#4571: and the wake says that contents are undefined."""
    model = build()
    checkpoint = {name: tensor.cpu().clone() for name, tensor in model.state_dict().items()}
    cumem.sleep(level=2)
    assert cumem.wake_up(fill="poison").undefined == {"weights"}
    model.load_state_dict(checkpoint)
    assert all(same_bytes(model.state_dict()[name], checkpoint[name]) for name in checkpoint)
    assert is_poison(model.rope)
    assert all(is_poison(tensor) for tensor in model.plain())


def test_kept_tables_scales_and_adapters_survive_a_full_discard() -> None:
    """C1, OpenRLHF#723; C4, vllm#28783; C14, vllm#41564: pytrees of tensors can be kept."""
    model = build()
    before = [host_bytes_of(tensor) for tensor in (model.rope, *model.plain())]
    cumem.keep([model.rope, model.scale, model.stacked, model.index])
    for _ in range(2):
        cumem.sleep(level=2)
        cumem.wake_up(fill="poison")
    after = (model.rope, *model.plain())
    assert all(same_bytes(tensor, expected) for tensor, expected in zip(after, before, strict=True))
    assert is_poison(model.linear.weight)


def test_level_1_needs_no_list_at_all() -> None:
    """C3, C18, sglang#6367, sglang#4336: by default nothing of a model is lost."""
    model = build()
    tensors = [*named_tensors(model).values(), *model.plain()]
    before = [host_bytes_of(tensor) for tensor in tensors]
    report = cumem.sleep()
    assert (report.discarded_bytes, report.offloaded_bytes) == (0, tag_stats("weights").live_bytes)
    assert cumem.wake_up(fill="poison").undefined == frozenset()
    assert all(
        same_bytes(tensor, expected) for tensor, expected in zip(tensors, before, strict=True)
    )


def test_a_small_tensor_made_in_a_scope_that_is_discarded_can_be_seen_there() -> None:
    """C8, vllm#53344, vllm#53508: a table made while the cache's scope was open."""
    with cumem.use_memory_pool("kv_cache"):
        cache = make(12 * MIB)
        table = make(4096, 5)
    owner = torch.nn.Module()
    owner.register_buffer("cache", cache)
    (intruder,) = cumem.uncovered(owner, "kv_cache")
    assert (intruder.address, intruder.bytes) == (table.data_ptr(), 4096)
    assert intruder.tensors[0] is table
    del intruder
    cumem.sleep()
    assert cumem.wake_up(fill="poison").undefined == {"kv_cache"}
    assert is_poison(table)


def test_small_tensors_of_two_policies_never_share_a_segment() -> None:
    """C6, TMS#85; C7, sglang#31674: what happens to a tensor is not its neighbour's affair."""
    tensors = {}
    for round_ in range(3):
        for policy in ("discard", "offload", "keep"):
            with cumem.use_memory_pool("weights", on_sleep=policy):
                tensors[policy, round_] = make(1024, round_)
    segments = {
        policy: {tensors[policy, round_].data_ptr() // GRANULE for round_ in range(3)}
        for policy in ("discard", "offload", "keep")
    }
    assert len(set().union(*segments.values())) == 3
    cumem.sleep()
    assert all(holds_pattern(tensors["keep", round_], round_) for round_ in range(3))
    cumem.wake_up(fill="poison")
    assert all(holds_pattern(tensors["offload", round_], round_) for round_ in range(3))
    assert all(is_poison(tensors["discard", round_]) for round_ in range(3))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
def test_a_scale_of_four_bytes_comes_back_exactly(dtype: torch.dtype) -> None:
    """C4, vllm#28783, vllm#45617, vllm#57163: neither zero nor one, but what it was."""
    with cumem.use_memory_pool("weights"):
        scales = [
            torch.tensor(0.0031 * at, dtype=dtype, device=cumem.default_device())
            for at in range(1, 9)
        ]
        large = make(12 * MIB, 2)
    expected = [scale.item() for scale in scales]
    for _ in range(3):
        cumem.sleep()
        cumem.wake_up(fill="zero")
        assert [scale.item() for scale in scales] == expected
    assert holds_pattern(large, 2)


def test_discarded_memory_is_filled_as_asked_every_time() -> None:
    """C5, vllm#45542, vllm#44972, vllm#52597: a cache comes back without leftovers."""
    with cumem.use_memory_pool("kv_cache"):
        cache = torch.ones(3 * MIB // 4, device=cumem.default_device())
    for fill in ("poison", "zero", "poison"):
        cumem.sleep()
        cumem.wake_up(fill=fill)
        assert cache.isnan().all() if fill == "poison" else not cache.any()
