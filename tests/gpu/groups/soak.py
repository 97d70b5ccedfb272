"""Does anything grow over many cycles?

CUMEM_SOAK_CYCLES says how many (default 40); CUMEM_SOAK_MIB how large one set of
tensors is at most (default 1024).
"""

from __future__ import annotations

import gc
import os
import random
import sys
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path

import cuda_oracle as oracle
import torch
from harness import note, run
from support import CUDA, DEVICE, GRANULE, MIB, addresses, holds, make, scaled, synchronize
from witness import Witness

import cumem
from cumem import _C, _runtime

CYCLES = int(os.environ.get("CUMEM_SOAK_CYCLES", "40"))
SET_BYTES = scaled(int(os.environ.get("CUMEM_SOAK_MIB", "1024")) * MIB)
ROUNDS = 5000
WARM = 5  # cycles until what is set up once is set up
RSS_SLACK = 64 * MIB
COUNTS_SLACK = 2  # descriptors and threads of libraries come and go


@dataclass
class Level:
    """What must not grow."""

    device_bytes: int  # used, as another process sees it
    handles: int
    reserved_addresses: int
    physical_bytes: int
    host_bytes: int
    resident_bytes: int
    descriptors: int
    threads: int
    maps: int


def level(free_bytes: Callable[[], int]) -> Level:
    """Everything given back, and then what is left."""
    gc.collect()
    cumem.trim()
    cumem.release_host_memory()
    if CUDA:
        torch.cuda.empty_cache()
    synchronize()
    stats = cumem.stats()
    return Level(
        device_bytes=-free_bytes(),
        handles=stats.handles_created - stats.handles_released,
        reserved_addresses=stats.reserved_addresses,
        physical_bytes=stats.physical_bytes,
        host_bytes=stats.host_bytes,
        resident_bytes=_resident_bytes(),
        descriptors=len(os.listdir("/proc/self/fd")),
        threads=len(os.listdir("/proc/self/task")),
        maps=len(Path("/proc/self/maps").read_text(encoding="ascii").splitlines()),
    )


def _resident_bytes() -> int:
    pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


def random_sizes(chance: random.Random) -> list[int]:
    sizes: list[int] = []
    while sum(sizes) < SET_BYTES:
        sizes.append(int(2 ** chance.uniform(0, SET_BYTES.bit_length() - 3)))
    return sizes


def one_cycle(number: int) -> None:
    """Random sets in two tags, some of which die asleep; all others are whole after it."""
    chance = random.Random(number)
    kept = dict(enumerate(make("weights", random_sizes(chance))))
    make_some = chance.random() < 0.5
    cache = make("kv_cache", [scaled(200 * MIB), MIB]) if make_some else []
    cumem.sleep(tags=["weights"] if chance.random() < 0.3 else None)
    for seed in chance.sample(sorted(kept), len(kept) // 4):
        del kept[seed]
    where = addresses(list(kept.values()))
    if chance.random() < 0.5:
        cumem.trim()
    cumem.wake_up()
    assert addresses(list(kept.values())) == where
    cumem.sleep()
    cumem.wake_up(fill=chance.choice([None, "zero", "poison"]))
    wrong = [seed for seed, tensor in kept.items() if not holds(tensor, seed)]
    assert not wrong, (number, wrong)
    cumem.check()
    del cache, kept
    if chance.random() < 0.5:
        cumem.trim()


def nothing_grows() -> None:
    make("weights", [1])
    make("kv_cache", [1])
    with Witness() if CUDA else nullcontext() as witness:
        free_bytes = witness.free_bytes if witness is not None else oracle.free_bytes
        for number in range(WARM):
            one_cycle(number)
        before = level(free_bytes)
        for number in range(WARM, WARM + CYCLES):
            one_cycle(number)
        after = level(free_bytes)
    grown = {
        name: value - asdict(before)[name]
        for name, value in asdict(after).items()
        if value != asdict(before)[name]
    }
    note(f"{CYCLES} cycles; what changed: {grown}")
    assert grown.pop("device_bytes", 0) <= GRANULE
    assert grown.pop("resident_bytes", 0) <= RSS_SLACK
    assert grown.pop("maps", 0) <= 64
    assert grown.pop("descriptors", 0) <= COUNTS_SLACK
    assert grown.pop("threads", 0) <= COUNTS_SLACK
    assert not grown, grown
    assert after.host_bytes == after.physical_bytes == 0


def many_cycles_of_one_set() -> None:
    """The same tensors again and again: what a server does, all day."""
    tensors = make("weights", [scaled(64 * MIB), MIB, 7])
    cumem.sleep()
    cumem.wake_up()
    nothing = sys.getrefcount(None)
    before = cumem.stats()
    resident = _resident_bytes()
    for _ in range(10 * CYCLES):
        cumem.sleep()
        cumem.wake_up()
    after = cumem.stats()
    drift = sys.getrefcount(None) - nothing
    note(f"{10 * CYCLES} cycles; references to None: {drift:+d}")
    assert abs(drift) < 1000
    assert after.handles_created - after.handles_released == (
        before.handles_created - before.handles_released
    )
    assert after.host_bytes == before.host_bytes
    assert _resident_bytes() - resident <= RSS_SLACK
    assert all(holds(tensor, seed) for seed, tensor in enumerate(tensors))


def rounds_of_allocation_and_death_leave_no_addresses() -> None:
    """Every round reserves addresses, and the last must find as many as the first."""
    allocator = _runtime.current().allocator
    owner = _C.Owner("weights", "offload")
    make("weights", [1])
    before = cumem.stats()
    for number in range(ROUNDS):
        allocator.free(allocator.malloc(1 + number * 997 % (2 * GRANULE), 0, 0, owner))
    after = cumem.stats()
    assert after.reserved_addresses == before.reserved_addresses
    assert after.physical_bytes == before.physical_bytes
    assert after.handles_created - before.handles_created >= ROUNDS
    assert after.handles_released - before.handles_released == (
        after.handles_created - before.handles_created
    )
    cumem.check()


if __name__ == "__main__":
    torch.empty(1, device=DEVICE)
    oracle.prepare()
    run(
        [
            nothing_grows,
            many_cycles_of_one_set,
            rounds_of_allocation_and_death_leave_no_addresses,
        ]
    )
