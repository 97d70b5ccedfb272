"""Does the emulated pool hand out and give back memory as torch's does?"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from fake_plugin import FakePlugin, Owner, blocks, is_of, live, take

from cumem._emulated_pool import EmulatedMemPool, empty_cache, memory_snapshot, use_emulated_pool
from cumem._emulated_tensors import give

MIB = 1 << 20


@pytest.mark.parametrize(
    ("size", "segment", "block"),
    [
        (1, 2 * MIB, 512),
        (513, 2 * MIB, 1024),
        (MIB, 2 * MIB, MIB),
        (MIB + 1, 20 * MIB, MIB + 512),
        (10 * MIB - 512, 20 * MIB, 10 * MIB - 512),
        (10 * MIB, 10 * MIB, 10 * MIB),
        (11 * MIB - 5, 12 * MIB, 12 * MIB),
        (30 * MIB, 30 * MIB, 30 * MIB),
    ],
)
def test_a_request_is_rounded_and_served_from_a_segment_of_its_class(
    plugin: FakePlugin, pool: EmulatedMemPool, size: int, segment: int, block: int
) -> None:
    owners = take(pool, size)
    assert plugin.asked == [segment]
    assert live(pool) == [block]
    assert pool.snapshot()[0]["blocks"][0]["requested_size"] == size
    del owners


def test_small_blocks_share_a_segment_and_never_use_a_large_one(
    plugin: FakePlugin, pool: EmulatedMemPool
) -> None:
    owners = take(pool, 3 * MIB, 1000, 2000)
    assert plugin.asked == [20 * MIB, 2 * MIB]
    kinds = {segment["segment_type"]: segment for segment in pool.snapshot()}
    assert [block["size"] for block in kinds["small"]["blocks"][:2]] == [1024, 2048]
    assert kinds["large"]["allocated_size"] == 3 * MIB
    del owners


def test_a_large_block_is_split_only_if_more_than_one_mib_is_left(pool: EmulatedMemPool) -> None:
    owners = take(pool, 9 * MIB, 9 * MIB, MIB + 1)
    assert blocks(pool) == [(9 * MIB, "active_allocated")] * 2 + [(2 * MIB, "active_allocated")]
    del owners


def test_the_free_block_that_fits_best_is_used_again(pool: EmulatedMemPool) -> None:
    owners = take(pool, 4096, 512, 1024, 512, 2048, 512)
    before = pool.snapshot()[0]["blocks"]
    owners[0] = owners[2] = owners[4] = Owner()
    block = pool.allocate(900)
    assert block.address == before[2]["address"]
    give(block, owners[0])


def test_neighbours_become_one_block_when_both_are_free(pool: EmulatedMemPool) -> None:
    owners = take(pool, 512, 512, 512)
    owners[0] = Owner()
    assert [size for size, _ in blocks(pool)] == [512, 512, 512, 2 * MIB - 1536]
    owners[2] = Owner()
    assert [size for size, _ in blocks(pool)] == [512, 512, 2 * MIB - 1024]
    owners[1] = Owner()
    assert blocks(pool) == [(2 * MIB, "inactive")]


def test_the_snapshot_adds_up(pool: EmulatedMemPool) -> None:
    owners = take(pool, 700, 5 * MIB, 100)[::2]
    for segment in pool.snapshot(include_traces=False):
        assert sum(block["size"] for block in segment["blocks"]) == segment["total_size"]
        starts = [block["address"] for block in segment["blocks"]]
        assert starts == sorted(starts)
        assert starts[0] == segment["address"]
        assert (segment["segment_pool_id"], segment["device"]) == (pool.id, 0)
    assert [segment["allocated_size"] for segment in pool.snapshot()].count(1536) == len(owners) - 1
    assert [info for info in memory_snapshot() if info["segment_pool_id"] == pool.id] == (
        pool.snapshot()
    )


def test_segments_stay_while_the_pool_does(plugin: FakePlugin, pool: EmulatedMemPool) -> None:
    take(pool, 100, 3 * MIB)
    empty_cache()
    assert plugin.freed == []
    take(pool, 100, 3 * MIB)
    assert plugin.asked == [2 * MIB, 20 * MIB]


def test_retiring_gives_free_segments_back_and_live_blocks_outlive_it(
    plugin: FakePlugin, pool: EmulatedMemPool
) -> None:
    owners = take(pool, 200, 100)
    del owners[0]
    take(pool, 3 * MIB)
    pool.retire()
    assert plugin.freed == [20 * MIB]
    empty_cache()
    assert [info["allocated_size"] for info in memory_snapshot() if is_of(info, pool)] == [512]
    owners.clear()
    assert plugin.freed == [20 * MIB]
    empty_cache()
    assert plugin.freed == [20 * MIB, 2 * MIB]
    assert not [info for info in memory_snapshot() if is_of(info, pool)]


def test_a_retired_pool_cannot_be_used(pool: EmulatedMemPool) -> None:
    pool.retire()
    uses: list[Callable[[], object]] = [pool.snapshot, pool.use_count, pool.retire]
    uses += [lambda: pool.allocate(1), use_emulated_pool(pool).__enter__]
    for use in uses:
        with pytest.raises(RuntimeError, match="was retired"):
            use()


def test_retiring_while_a_scope_is_open_on_the_device_changes_nothing(
    plugin: FakePlugin, pool: EmulatedMemPool
) -> None:
    take(pool, 100)
    with (
        use_emulated_pool(EmulatedMemPool(plugin.functions, 0)),
        pytest.raises(RuntimeError, match="device 0"),
    ):
        pool.retire()
    with use_emulated_pool(EmulatedMemPool(plugin.functions, 1)):
        pool.retire()
    assert plugin.freed == [2 * MIB]


def test_out_of_memory_says_how_much_was_asked_for_and_where(plugin: FakePlugin) -> None:
    plugin.capacity = 4 * MIB
    pool = EmulatedMemPool(plugin.functions, 3)
    with (
        use_emulated_pool(pool),
        pytest.raises(torch.OutOfMemoryError, match=r"device 3 .* 5242880 bytes .* 20 MiB"),
    ):
        torch.zeros(5 * MIB, dtype=torch.uint8)
    with use_emulated_pool(pool):
        assert plugin.holds(torch.zeros(10))


def test_retired_segments_are_given_back_to_serve_a_request_only_outside_scopes(
    plugin: FakePlugin, pool: EmulatedMemPool
) -> None:
    plugin.capacity = 4 * MIB
    retired = EmulatedMemPool(plugin.functions, 0)
    owners = take(retired, MIB, MIB, MIB)
    retired.retire()
    owners.clear()
    with use_emulated_pool(pool), pytest.raises(torch.OutOfMemoryError):
        torch.ones(10)
    take(pool, 100)
    assert plugin.freed == [2 * MIB, 2 * MIB]
