"""Does a declaration of clean contents ever lose what nobody declared?"""

from __future__ import annotations

import gc

import pytest
import torch
from support import GRANULE, MIB, fill_pattern, holds_pattern, make

import cumem


@pytest.fixture(autouse=True)
def _declared() -> None:
    cumem.configure(cumem.Options(clean_check=cumem.CleanCheck.DECLARED))


def cycle() -> cumem.SleepReport:
    report = cumem.sleep()
    cumem.wake_up()
    return report


def declared(size: int = 4 * MIB, seed: int = 1) -> torch.Tensor:
    """A tensor that is declared clean, with a backup of its contents."""
    with cumem.use_memory_pool("weights"):
        tensor = make(size, seed)
    cumem.mark_clean(tensor)
    assert cycle().copied_bytes >= size
    return tensor


def test_declared_contents_are_copied_once() -> None:
    tensor = declared()
    for _ in range(2):
        report = cycle()
        assert (report.copied_bytes, report.skipped_bytes) == (0, 4 * MIB)
    assert holds_pattern(tensor, 1)


def test_contents_that_were_taken_back_are_copied() -> None:
    tensor = declared()
    cumem.mark_dirty(tensor)
    fill_pattern(tensor, 2)
    assert cycle().copied_bytes == 4 * MIB
    assert holds_pattern(tensor, 2)


def test_contents_written_between_two_declarations_are_not_lost() -> None:
    tensor = declared()
    cumem.mark_dirty(tensor)
    fill_pattern(tensor, 2)
    cumem.mark_clean(tensor)  # from now on; the backup is older
    cycle()
    assert holds_pattern(tensor, 2)
    assert cycle().copied_bytes == 0
    assert holds_pattern(tensor, 2)


def test_a_declaration_goes_with_its_tensor_and_not_with_its_address() -> None:
    tensor = declared()
    place = tensor.data_ptr()
    del tensor
    gc.collect()
    with cumem.use_memory_pool("weights"):
        another = make(4 * MIB, 2)
    assert another.data_ptr() == place
    cycle()
    assert holds_pattern(another, 2)


def test_a_tensor_in_the_segment_of_a_declared_one_is_copied() -> None:
    """sglang#31674: what is said of one tensor must not be taken for its neighbour."""
    with cumem.use_memory_pool("weights"):
        first, second = make(GRANULE // 4, 1), make(GRANULE // 4, 2)
    cumem.mark_clean(first)
    cycle()
    fill_pattern(second, 3)
    cycle()
    assert holds_pattern(first, 1)
    assert holds_pattern(second, 3)


@pytest.mark.parametrize("check", ["digest", "never"])
def test_a_declaration_counts_only_where_it_is_asked_for(check: str) -> None:
    tensor = declared()
    fill_pattern(tensor, 2)
    cumem.configure(cumem.Options(clean_check=check))
    cycle()
    assert holds_pattern(tensor, 2)


def test_every_way_of_checking_may_follow_every_other() -> None:
    with cumem.use_memory_pool("weights"):
        tensor = make(4 * MIB, 0)
    ways = ["digest", "declared", "never", "digest", "never", "declared", "digest"]
    for seed, way in enumerate(ways, start=1):
        cumem.configure(cumem.Options(clean_check=way))
        fill_pattern(tensor, seed)
        cycle()
        assert holds_pattern(tensor, seed), way
        cycle()
        assert holds_pattern(tensor, seed), way
