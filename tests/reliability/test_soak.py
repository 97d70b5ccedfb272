"""Does anything grow with time? ``CUMEM_HYPOTHESIS_PROFILE=long`` looks longer."""

from __future__ import annotations

import gc
import os
import random
from dataclasses import dataclass
from pathlib import Path

import pytest
from profiles import is_long
from support import GRANULE, MIB, DriverUnderTest, holds_pattern, make, memory_at, outside_scopes

import cumem

CYCLES = 1000 if is_long() else 200
ROUNDS = 5000
POOLS = 500

_PAGE = os.sysconf("SC_PAGE_SIZE")


@dataclass(frozen=True)
class Level:
    """What must be as it was; RSS apart, which the system rounds and caches."""

    used_bytes: int
    physical_bytes: int
    reserved_addresses: int
    live_handles: int
    host_bytes: int
    locked_bytes: int
    file_descriptors: int
    ledger: tuple[tuple[str, int], ...]


def level(driver: DriverUnderTest) -> Level:
    stats = cumem.stats()
    made_once = ("modules", "pending_work")
    return Level(
        used_bytes=driver.used_bytes(),
        physical_bytes=stats.physical_bytes,
        reserved_addresses=stats.reserved_addresses,
        live_handles=stats.handles_created - stats.handles_released,
        host_bytes=stats.host_bytes,
        locked_bytes=locked_bytes(),
        file_descriptors=len(os.listdir("/proc/self/fd")),
        ledger=tuple(
            (kind, count)
            for kind, count in (driver.emulator.ledger() if driver.emulated else {}).items()
            if kind not in made_once
        ),
    )


def locked_bytes() -> int:
    (line,) = [
        line for line in Path("/proc/self/status").read_text().splitlines() if "VmLck" in line
    ]
    return int(line.split()[1]) * 1024


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * _PAGE


def mappings() -> int:
    return len(Path("/proc/self/maps").read_text().splitlines())


def one_cycle(number: int, chance: random.Random) -> None:
    sizes = [chance.randrange(1, 6 * MIB) if chance.random() < 0.2 else chance.randrange(1, 9000)]
    sizes += [chance.randrange(1, 5000) for _ in range(chance.randrange(4))]
    with cumem.use_memory_pool("weights"):
        tensors = [make(size, number + at) for at, size in enumerate(sizes)]
    with cumem.use_memory_pool("kv_cache"):
        kv = make(chance.randrange(1, MIB))
    cumem.sleep(level=chance.choice([1, 1, 1, 2]), offload_tags=None)
    report = cumem.wake_up(fill=chance.choice([None, "zero", "poison"]))
    if "weights" not in report.undefined:
        assert all(holds_pattern(tensor, number + at) for at, tensor in enumerate(tensors))
    del tensors, kv
    cumem.trim()


@pytest.mark.parametrize("retain", [True, False], ids=["kept backups", "dropped backups"])
def test_cycles_of_random_sizes_end_where_they_began(driver: DriverUnderTest, retain: bool) -> None:
    """vllm#21336, vllm#16663, vllm#55206, TMS#89: device and host memory lost cycle by cycle."""
    cumem.configure(cumem.Options(retain_backup=retain))
    chance = random.Random(1)
    for number in range(20):
        one_cycle(number, chance)
    cumem.release_host_memory()
    gc.collect()
    start, resident, mapped = level(driver), resident_bytes(), mappings()
    for number in range(CYCLES // 2):
        one_cycle(number, chance)
    cumem.release_host_memory()
    gc.collect()
    assert level(driver) == start
    assert resident_bytes() - resident < 16 * MIB
    assert mappings() - mapped < 50


def test_cycles_of_one_set_hold_one_backup_and_no_more(driver: DriverUnderTest) -> None:
    """TMS#86, vllm#56410: host memory is one backup, neither two nor a power of two."""
    with cumem.use_memory_pool("weights"):
        tensors = [make(size, size) for size in (100, 777, 3 * MIB, 9 * MIB + 1)]
    cumem.sleep()
    cumem.wake_up()
    start = level(driver)
    backup = sum(tensor.numel() for tensor in tensors)
    for _ in range(CYCLES // 4):
        report = cumem.sleep()
        assert report.host_bytes < 1.05 * backup + 16384
        cumem.wake_up()
    assert level(driver) == start
    assert all(holds_pattern(tensor, tensor.numel()) for tensor in tensors)


def test_rounds_of_allocation_and_death_leave_no_addresses(driver: DriverUnderTest) -> None:
    """pytorch#186213, nccl#2331: address space is finite, too."""
    from cumem import _C, _runtime

    allocator = _runtime.current().allocator
    owner = _C.Owner("weights", "offload")
    start, mapped = level(driver), mappings()
    for number in range(ROUNDS):
        address = allocator.malloc(1 + number * 997 % (2 * GRANULE), 0, 0, owner)
        assert address % GRANULE == 0
        if number % 50 == 0:
            allocator.sleep(
                [_C.SegmentPlan(address, [], [], _C.Store.host)], _C.CleanCheck.never, False
            )
        allocator.free(address)
    assert level(driver) == start
    assert mappings() - mapped < 50


def test_hundreds_of_pools_made_and_dropped_leave_nothing(driver: DriverUnderTest) -> None:
    """pytorch#145168: a pool that goes gives its memory back."""
    with cumem.use_memory_pool("tag 0"):  # a first cycle makes what is made once
        tensor = make(100)
    cumem.sleep()
    cumem.wake_up()
    del tensor
    cumem.trim()
    cumem.release_host_memory()
    start = level(driver)
    for number in range(POOLS):
        with cumem.use_memory_pool(
            f"tag {number % 7}", on_sleep=("offload", "discard")[number % 2]
        ):
            first = make(100, number)
        with cumem.use_memory_pool(f"tag {number % 7}"):
            second = make(2000, number)
        if number % 3 == 0:
            cumem.trim()  # the pool goes before its tensors
        if number % 4 == 0:
            cumem.sleep()
            cumem.wake_up()
        assert holds_pattern(second, number)
        del first, second
        cumem.trim()
    cumem.release_host_memory()
    assert level(driver) == start


@pytest.mark.needs("memory that the host can write")
def test_memory_that_others_dirtied_never_shows(driver: DriverUnderTest) -> None:
    """TMS#71, sglang#15246, miles#835: backed up, and yet something else after the wake."""
    from model import Tenant

    chance = random.Random(2)
    for seed in range(50 if is_long() else 6):
        with cumem.use_memory_pool("weights"):
            tensors = [make(chance.randrange(1, 3 * MIB), seed + at) for at in range(4)]
            views = [tensor[len(tensor) // 3 :] for tensor in tensors]
            del tensors[seed % 4]
        for _ in range(5):
            cumem.sleep()
            with Tenant(
                driver.emulator.machine, driver.free_bytes() // 4 // GRANULE * GRANULE
            ) as one:
                one.dirty()
            cumem.wake_up()
            seeds = [seed + at for at in range(4) if at != seed % 4]
            for tensor, expected in zip(tensors, seeds, strict=True):
                assert holds_pattern(tensor, expected)
        with outside_scopes():
            assert memory_at(views[0].data_ptr(), 1).numel() == 1
        del tensors, views
        cumem.trim()
