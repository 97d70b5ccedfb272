"""Are buffers placed so that none disturbs another, and in as little as the plan says?"""

from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import cumem
from cumem import _placing

KIB, MIB = 1 << 10, 1 << 20

# A small Llama-3.2-1B engine: batch 2, prompts of 512 tokens, bf16. Where one buffer has
# two roles the roles are planned apart; steps are those of one decoder layer and the head.
EMBEDDING, HIDDEN, KV, HEADS, VOCABULARY, PROMPT, BATCH = 2048, 8192, 512, 32, 128_256, 512, 2
LAYER = [
    # name, elements, dtype, bytes, first and last step
    ("hidden state", (PROMPT, EMBEDDING), torch.bfloat16, 2 * MIB, 0, 12),
    ("rms norms", (PROMPT, EMBEDDING), torch.bfloat16, 2 * MIB, 1, 12),
    ("q projection", (PROMPT, EMBEDDING), torch.bfloat16, 2 * MIB, 2, 3),
    ("attention output", (PROMPT, EMBEDDING), torch.bfloat16, 2 * MIB, 4, 5),
    ("o projection", (PROMPT, EMBEDDING), torch.bfloat16, 2 * MIB, 5, 6),
    ("down projection", (PROMPT, EMBEDDING), torch.bfloat16, 2 * MIB, 9, 10),
    ("input embeddings", (PROMPT, EMBEDDING), torch.bfloat16, 2 * MIB, 0, 12),
    ("attention scores", (PROMPT, PROMPT, HEADS), torch.bfloat16, 16 * MIB, 3, 4),
    ("gate", (PROMPT, HIDDEN), torch.bfloat16, 8 * MIB, 7, 9),
    ("up", (PROMPT, HIDDEN), torch.bfloat16, 8 * MIB, 8, 9),
    ("logits", (PROMPT, VOCABULARY), torch.bfloat16, 131_334_144, 12, 13),
    ("k of a prompt", (PROMPT, KV), torch.bfloat16, 512 * KIB, 2, 4),
    ("v of a prompt", (PROMPT, KV), torch.bfloat16, 512 * KIB, 2, 4),
    ("k of a step", (BATCH, KV), torch.bfloat16, 2 * KIB, 2, 4),
    ("v of a step", (BATCH, KV), torch.bfloat16, 2 * KIB, 2, 4),
    ("last tokens", (BATCH,), torch.int32, 8, 0, 13),
    ("active slots", (BATCH,), torch.int32, 8, 0, 13),
    ("sequence lengths", (BATCH,), torch.int32, 8, 0, 13),
]
ROLES = {  # that share one buffer in that engine
    "shared 1": ("q projection", "attention output"),
    "shared 2": ("o projection", "down projection"),
}


def engine() -> cumem.BufferPlan:
    plan = cumem.BufferPlan()
    for name, shape, dtype, _, first, last in LAYER:
        plan.add(name, shape, dtype, first=first, last=last)
    return plan


def test_buffers_of_the_small_engine_have_their_sizes_to_the_byte() -> None:
    plan = engine()
    assert {buffer.name: buffer.bytes for buffer in plan.buffers} == {
        name: count for name, _, _, count, _, _ in LAYER
    }
    assert 125.25 * MIB == 131_334_144
    roles = plan.payload_bytes - 2 * 2 * MIB  # each pair of roles is one buffer there
    assert roles == 5 * 2 * MIB + 16 * MIB + 2 * 8 * MIB + 131_334_144 + MIB + 4 * KIB + 24
    assert roles == 176_427_032


def test_the_small_engine_without_sharing_has_every_role_aligned() -> None:
    plan = engine()
    rounded = 3 * (512 - 8)  # three buffers of 8 bytes
    assert plan.unshared_bytes == plan.payload_bytes + rounded
    offsets = plan.offsets(share=False)
    assert offsets["hidden state"] == 0
    assert offsets["sequence lengths"] + 512 == plan.unshared_bytes


def test_the_small_engine_with_its_own_sharing_is_found_and_proven() -> None:
    """The two pairs of roles share, because the first is read to its end before the second."""
    plan = cumem.BufferPlan()
    for name, shape, dtype, _, first, last in LAYER:
        shares = any(name in pair for pair in ROLES.values())
        plan.add(name, shape, dtype, first=first if shares else 0, last=last if shares else 13)
    offsets = plan.offsets()
    assert plan.bytes == plan.unshared_bytes - 2 * 2 * MIB
    assert plan.bytes == 176_427_032 + 3 * (512 - 8)
    assert len(set(offsets.values())) == len(LAYER) - 2


def test_the_small_engine_with_all_lifetimes_needs_little_more_than_its_logits() -> None:
    plan = engine()
    at_the_head = 131_334_144 + 3 * 2 * MIB + 3 * 512
    assert plan.bytes == plan.least_bytes == at_the_head


def test_a_role_that_is_read_too_long_does_not_share() -> None:
    plan = cumem.BufferPlan()
    plan.add("q", 2 * MIB, first=2, last=4)
    plan.add("attention output", 2 * MIB, first=4, last=5)
    assert plan.bytes == 4 * MIB
    late = cumem.BufferPlan()
    late.add("q", 2 * MIB, first=2, last=3)
    late.add("attention output", 2 * MIB, first=4, last=5)
    assert late.bytes == 2 * MIB


some_buffers = st.lists(
    st.tuples(st.integers(1, 5000), st.integers(-3, 20), st.integers(0, 10)), max_size=25
)


@given(some_buffers)
def test_what_lives_at_once_never_overlaps(found: list[tuple[int, int, int]]) -> None:
    plan = cumem.BufferPlan()
    for index, (count, first, length) in enumerate(found):
        plan.add(str(index), count, first=first, last=first + length)
    offsets = plan.offsets()
    steps = {step for _, first, length in found for step in (first, first + length)}
    for step in steps:
        taken = sorted(
            (offsets[buffer.name], buffer.bytes)
            for buffer in plan.buffers
            if buffer.first <= step <= buffer.last
        )
        for (at, count), (after, _) in itertools.pairwise(taken):
            assert at + count <= after
    assert all(at % 512 == 0 for at in offsets.values())
    assert plan.least_bytes <= plan.bytes <= plan.unshared_bytes
    assert plan.offsets() == offsets


def test_the_smallest_gap_that_fits_is_taken() -> None:
    plan = cumem.BufferPlan()
    for name, count, first, last in (
        ("floor", 9 * KIB, 0, 1),
        ("large", 8 * KIB, 0, 0),
        ("middle", 7 * KIB, 0, 1),
        ("small", 4 * KIB, 0, 0),
        ("top", 3 * KIB, 0, 1),
        ("late", 2 * KIB, 1, 1),
    ):
        plan.add(name, count, first=first, last=last)
    assert plan.offsets()["late"] == plan.offsets()["small"]


def test_a_wrong_placement_would_be_found(monkeypatch: pytest.MonkeyPatch) -> None:
    plan = cumem.BufferPlan()
    plan.add("a", 1000, first=0, last=2)
    plan.add("b", 1000, first=2, last=3)
    monkeypatch.setattr(_placing, "_best_gap", lambda *_: 512)
    with pytest.raises(cumem.CumemError, match="'b' and 'a' live at once and overlap"):
        plan.offsets()


def test_the_plan_prints_its_table() -> None:
    plan = cumem.BufferPlan()
    plan.add("a", 1024, first=0, last=2)
    plan.add("b", 1024, first=3, last=4)
    assert str(plan).splitlines() == [
        "buffer  bytes  steps  offset",
        "a        1024    0-2       0",
        "b        1024    3-4       0",
        "1.0 KiB with sharing, 2.0 KiB without",
    ]


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        (("a", 5), ValueError, "there is a buffer 'a' already"),
        (("b", 0), ValueError, "has no bytes"),
        (("b", (3, -1)), ValueError, "has no bytes"),
        (("b", 5, torch.uint8, 3, 2), ValueError, "ends at step 2, before it begins at 3"),
        ((7, 5), TypeError, "name must be a string, not 7"),
        (("b", None), TypeError, "shape of buffer 'b' must be ints, not None"),
        (("b", 1.5), TypeError, "shape of buffer 'b' must be ints, not 1.5"),
        (("b", torch.nn.Linear(1, 1)), TypeError, "must be ints, not a Linear"),
        (("b", (1.5,)), TypeError, "lengths of buffer 'b' must be ints"),
        (("b", 5, "float16"), TypeError, "dtype must be a torch.dtype"),
        (("b", 5, torch.uint8, 0, 1.0), TypeError, "steps of buffer 'b' must be ints"),
    ],
)
def test_a_wrong_buffer_is_not_added(
    arguments: tuple[object, ...], error: type[Exception], message: str
) -> None:
    plan = cumem.BufferPlan()
    plan.add("a", 100, first=0, last=0)
    name, shape, dtype, first, last = (*arguments, *(torch.uint8, 0, 1)[len(arguments) - 2 :])
    with pytest.raises(error, match=message):
        plan.add(name, shape, dtype, first=first, last=last)
    assert [buffer.name for buffer in plan.buffers] == ["a"]
