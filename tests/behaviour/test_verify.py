"""Is a backup that is not what was put to sleep noticed when one asks?"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from support import GRANULE, MIB, fill_pattern, holds_pattern, host_bytes_of, make, state

import cumem

SIZES = (5 * MIB + 100, 700, 12 * MIB)
NEEDLE = 1 << 16  # many rows of the pattern, so that it is in one place only


def build() -> list[torch.Tensor]:
    with cumem.use_memory_pool("weights"):
        return [make(size, seed) for seed, size in enumerate(SIZES)]


def intact(tensors: list[torch.Tensor]) -> bool:
    return all(holds_pattern(tensor, seed) for seed, tensor in enumerate(tensors))


def arena_mappings() -> Iterator[tuple[int, int]]:
    """Where backups are: private memory that a fork would not copy."""
    begin = end = 0
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if line.startswith("VmFlags:"):
            flags = line.split()[1:]
            if {"rd", "wr", "dc"} <= set(flags) and not {"io", "pf", "sh"} & set(flags):
                yield begin, end
        elif "-" in line.split(" ", 1)[0]:
            begin, end = (int(part, 16) for part in line.split(" ", 1)[0].split("-"))


def damage(needle: bytes) -> None:
    """Flips a bit in the one place of the arena that holds these bytes."""
    memory = os.open("/proc/self/mem", os.O_RDWR)
    try:
        places = []
        for begin, end in arena_mappings():
            contents = os.pread(memory, end - begin, begin)
            at = contents.find(needle)
            while at >= 0:
                places.append(begin + at)
                at = contents.find(needle, at + 1)
        assert len(places) == 1
        os.pwrite(memory, bytes([needle[0] ^ 1]), places[0])
    finally:
        os.close(memory)


def bytes_at(tensor: torch.Tensor, offset: int) -> bytes:
    return host_bytes_of(tensor[offset : offset + NEEDLE]).numpy().tobytes()


@pytest.mark.parametrize("clean_check", ["digest", "never", "declared"])
def test_what_is_whole_passes_and_costs_a_phase(clean_check: str) -> None:
    cumem.configure(cumem.Options(clean_check=clean_check))
    tensors = build()
    for _ in range(2):
        assert "verify" in cumem.sleep(verify=True).phases
        assert "verify" in cumem.wake_up(verify=True).phases
        assert intact(tensors)
        tensors[2][77] ^= 1
        tensors[2][77] ^= 1
    assert "verify" not in cumem.sleep().phases
    assert "verify" not in cumem.wake_up().phases


@pytest.mark.parametrize("offset", [0, GRANULE - NEEDLE, GRANULE, 12 * MIB - NEEDLE])
def test_a_flipped_bit_is_noticed_at_wake_and_the_backup_is_kept(offset: int) -> None:
    tensors = build()
    needle = bytes_at(tensors[2], offset)
    cumem.sleep(verify=True)
    before = state()
    damage(needle)
    place = tensors[2].data_ptr() + offset
    for _ in range(2):
        with pytest.raises(cumem.IntegrityError, match=r"wake_up.*without verify") as caught:
            cumem.wake_up(verify=True)
        assert state() == before
    (piece,) = re.findall(r"0x[0-9a-f]+", str(caught.value))
    assert place - GRANULE < int(piece, 16) <= place
    assert not cumem.is_mapped(tensors[0])
    damage(bytes([needle[0] ^ 1]) + needle[1:])
    cumem.wake_up(verify=True)
    assert intact(tensors)


def test_a_kept_backup_that_is_damaged_is_noticed_before_anything_is_unmapped() -> None:
    tensors = build()
    if cumem.sleep().clean_check != "digest":
        pytest.skip("this machine cannot compile the digest kernel")
    cumem.wake_up()
    damage(bytes_at(tensors[0], 3 * MIB))
    with pytest.raises(cumem.IntegrityError, match="sleep"):
        cumem.sleep(verify=True)
    assert not cumem.is_sleeping()
    assert intact(tensors)
    cumem.check()
    assert cumem.sleep(verify=True).skipped_bytes == 0
    cumem.wake_up(verify=True)
    assert intact(tensors)


def test_a_wrong_declaration_is_noticed_at_sleep() -> None:
    cumem.configure(cumem.Options(clean_check="declared"))
    tensors = cumem.mark_clean(build())
    cumem.sleep()
    cumem.wake_up()
    fill_pattern(tensors[1], 50)
    with pytest.raises(cumem.IntegrityError):
        cumem.sleep(verify=True)
    assert not cumem.is_sleeping()
    assert holds_pattern(tensors[1], 50)
    cumem.mark_dirty(tensors)
    cumem.sleep(verify=True)
    cumem.wake_up(verify=True)
    assert holds_pattern(tensors[1], 50)


def test_a_discarding_sleep_has_nothing_to_verify() -> None:
    tensors = build()
    cumem.sleep(level=2, verify=True)
    cumem.wake_up(fill="zero", verify=True)
    assert not any(bool(tensor.any()) for tensor in tensors)


def test_only_what_is_woken_is_verified() -> None:
    tensors = build()
    with cumem.use_memory_pool("other"):
        other = make(6 * MIB, 9)
    needle = bytes_at(other, MIB)
    cumem.sleep(verify=True)
    damage(needle)
    cumem.wake_up(["weights"], verify=True)
    assert intact(tensors)
    with pytest.raises(cumem.IntegrityError):
        cumem.wake_up(verify=True)
    assert cumem.sleeping_tags() == {"other"}
    cumem.wake_up()
    assert bytes_at(other, MIB)[1:] == needle[1:]
