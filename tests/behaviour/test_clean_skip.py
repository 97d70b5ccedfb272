"""Does a sleep copy what has changed, and nothing else, and say so?"""

from __future__ import annotations

import pytest
import torch
from support import MIB, DriverUnderTest, fill_pattern, holds_pattern, make, tag_stats

import cumem
from cumem import _digest

SIZES = (5000, 3 * MIB, 26 * MIB + 77)
PIECE = 2 * MIB  # the unit in which changes are seen


def build() -> list[torch.Tensor]:
    with cumem.use_memory_pool("weights"):
        return [make(size, seed) for seed, size in enumerate(SIZES)]


def intact(tensors: list[torch.Tensor]) -> bool:
    return all(holds_pattern(tensor, seed) for seed, tensor in enumerate(tensors))


def cycle() -> cumem.SleepReport:
    """Sleeps and wakes; what the sleep said, which must add up."""
    live = tag_stats("weights").live_bytes
    report = cumem.sleep()
    assert report.offloaded_bytes == live
    assert report.copied_bytes + report.skipped_bytes == report.offloaded_bytes
    assert cumem.wake_up().restored_bytes == live
    cumem.check()
    return report


def needs_digests() -> None:
    if cycle().clean_check != "digest":
        pytest.skip("this machine cannot compile the digest kernel")


def test_a_first_sleep_copies_everything() -> None:
    tensors = build()
    report = cycle()
    assert report.skipped_bytes == 0
    assert intact(tensors)


def test_what_has_not_changed_is_not_copied() -> None:
    tensors = build()
    needs_digests()
    for _ in range(3):
        report = cycle()
        assert (report.clean_check, report.copied_bytes) == ("digest", 0)
        assert report.freed_bytes == tag_stats("weights").segment_bytes
        assert intact(tensors)


@pytest.mark.parametrize("place", [0, 1, PIECE - 1, PIECE, 26 * MIB + 76])
@pytest.mark.parametrize("bit", [0, 7])
def test_one_bit_costs_one_piece(place: int, bit: int) -> None:
    tensors = build()
    needs_digests()
    tensors[2][place] ^= 1 << bit
    report = cycle()
    assert 0 < report.copied_bytes <= PIECE
    assert cycle().copied_bytes == 0
    tensors[2][place] ^= 1 << bit
    assert intact(tensors)


def test_every_byte_changed_is_every_byte_copied() -> None:
    tensors = build()
    needs_digests()
    for seed, tensor in enumerate(tensors):
        fill_pattern(tensor, seed + 100)
    report = cycle()
    assert report.skipped_bytes < 2 * 4096  # what torch rounded up, at most
    assert all(holds_pattern(tensor, seed + 100) for seed, tensor in enumerate(tensors))


def test_what_was_written_back_counts_as_unchanged() -> None:
    tensors = build()
    needs_digests()
    fill_pattern(tensors[1], 50)
    fill_pattern(tensors[1], 1)
    assert cycle().copied_bytes == 0
    assert intact(tensors)


def test_new_and_dead_tensors_are_noticed() -> None:
    tensors = build()
    needs_digests()
    with cumem.use_memory_pool("weights"):
        tensors.append(make(4 * MIB, 3))
    cycle()
    del tensors[1]
    cycle()
    with cumem.use_memory_pool("weights"):
        tensors.insert(1, make(3 * MIB, 1))
    cycle()
    assert intact(tensors)


def test_a_discard_ends_what_was_kept() -> None:
    tensors = build()
    cycle()
    cumem.sleep(level=2)
    cumem.wake_up()
    for seed, tensor in enumerate(tensors):
        fill_pattern(tensor, seed)
    assert cycle().skipped_bytes == 0
    assert intact(tensors)


def test_never_copies_everything_each_time() -> None:
    cumem.configure(cumem.Options(clean_check="never"))
    tensors = build()
    for _ in range(2):
        report = cycle()
        assert (report.clean_check, report.skipped_bytes) == ("never", 0)
    assert intact(tensors)


def test_without_digests_everything_is_copied_and_the_report_says_so(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(_digest, "_EMULATED_IMAGE", b"no kernel\0")
    monkeypatch.setattr(_digest, "_image", lambda device: b"no kernel\0")
    from cumem import _runtime

    runtime = _runtime.current()
    if runtime.allocator.has_digester(0):
        pytest.skip("this process has loaded its kernel before")
    tensors = build()
    for _ in range(2):
        report = cycle()
        assert (report.clean_check, report.skipped_bytes) == ("never", 0)
    assert intact(tensors)
    runtime.digest_tried.clear()


def test_backups_that_are_not_retained_go_back_to_the_system() -> None:
    cumem.configure(cumem.Options(retain_backup=False))
    tensors = build()
    for _ in range(2):
        report = cycle()
        assert report.skipped_bytes == 0
        assert report.host_bytes >= report.offloaded_bytes
        assert cumem.stats().host_bytes == 0
    assert intact(tensors)


def test_released_host_memory_costs_a_copy_and_no_byte() -> None:
    tensors = build()
    cycle()
    assert cumem.release_host_memory() > 0
    assert cumem.stats().host_bytes == 0
    assert cycle().skipped_bytes == 0
    cumem.sleep()
    held = cumem.stats().host_used_bytes
    cumem.release_host_memory()
    assert cumem.stats().host_used_bytes == held  # what sleeps needs it
    cumem.wake_up()
    assert intact(tensors)


# Declarations


@pytest.fixture
def declared() -> None:
    cumem.configure(cumem.Options(clean_check="declared"))


@pytest.mark.usefixtures("declared")
def test_what_is_declared_clean_is_not_copied() -> None:
    tensors = build()
    cumem.mark_clean(tensors)
    first, second, third = cycle(), cycle(), cycle()
    assert first.skipped_bytes == 0
    for report in (second, third):
        assert (report.clean_check, report.copied_bytes) == ("declared", 0)
    assert intact(tensors)


@pytest.mark.usefixtures("declared")
def test_only_what_is_declared_is_skipped() -> None:
    tensors = build()
    cumem.mark_clean(tensors[2])
    cycle()
    for seed in (0, 1):
        fill_pattern(tensors[seed], seed + 70)
    report = cycle()
    assert 26 * MIB <= report.skipped_bytes <= 26 * MIB + 2 * PIECE
    assert holds_pattern(tensors[0], 70)
    assert holds_pattern(tensors[1], 71)
    assert holds_pattern(tensors[2], 2)


@pytest.mark.usefixtures("declared")
def test_what_is_declared_dirty_is_copied_and_may_be_declared_clean_again() -> None:
    tensors = build()
    cumem.mark_clean(tensors)
    cycle()
    cumem.mark_dirty(tensors)
    for seed, tensor in enumerate(tensors):
        fill_pattern(tensor, seed + 30)
    assert cycle().skipped_bytes == 0
    cumem.mark_clean(tensors)
    cycle()
    assert cycle().copied_bytes == 0
    assert all(holds_pattern(tensor, seed + 30) for seed, tensor in enumerate(tensors))


@pytest.mark.usefixtures("declared")
@pytest.mark.parametrize("was_clean", [False, True])
def test_what_was_written_before_the_declaration_is_not_lost(was_clean: bool) -> None:
    tensors = build()
    if was_clean:
        cumem.mark_clean(tensors)
    cycle()
    cumem.mark_dirty(tensors)
    for seed, tensor in enumerate(tensors):
        fill_pattern(tensor, seed + 30)
    cumem.mark_clean(tensors)
    cycle()
    cycle()
    assert all(holds_pattern(tensor, seed + 30) for seed, tensor in enumerate(tensors))


@pytest.mark.usefixtures("declared")
def test_a_declaration_ends_with_its_tensor(driver: DriverUnderTest) -> None:
    with cumem.use_memory_pool("weights"):
        old = cumem.mark_clean(make(12 * MIB, 1))
    cycle()
    cycle()
    place = old.data_ptr()
    del old
    with cumem.use_memory_pool("weights"):
        new = make(12 * MIB, 2)
    assert new.data_ptr() == place, "the test needs the block to be used again"
    cycle()
    assert holds_pattern(new, 2)


def test_declarations_are_only_read_when_they_count() -> None:
    tensors = build()
    cumem.mark_clean(tensors)
    cycle()
    fill_pattern(tensors[1], 40)
    cycle()
    assert holds_pattern(tensors[1], 40)


@pytest.mark.parametrize("call", [cumem.mark_clean, cumem.mark_dirty])
def test_only_tensors_and_modules_can_be_declared(call: object) -> None:
    with pytest.raises(TypeError):
        call([torch.zeros(3), "weights"])
    module = torch.nn.Linear(3, 3)
    assert call({"a": module, "b": [torch.zeros(2)]})["a"] is module
