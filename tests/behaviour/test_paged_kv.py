"""Does a paged cache give out blocks, sleep, forget and come back as it says?"""

from __future__ import annotations

import gc
import threading
from typing import Any

import pytest
import torch
from paged_kv_support import (
    BLOCK,
    LAYERS,
    blocks_hold,
    fill_blocks,
    make_cache,
    warm,  # noqa: F401 - pytest finds fixtures by name
)
from support import DriverUnderTest, fill_pattern, raw, tag_stats

import cumem
from cumem import paged_kv

# Memory and tensors


def test_each_layer_is_one_exact_segment(driver: DriverUnderTest) -> None:
    before = driver.used_bytes()
    cache = make_cache(blocks=64)
    assert cache.block_bytes == BLOCK
    assert driver.used_bytes() - before == LAYERS * 64 * BLOCK
    assert tag_stats("kv_cache").segments == LAYERS
    assert [tuple(layer.shape) for layer in cache.layers] == [(64, 2, 16, 8, 128)] * LAYERS
    assert all(layer.is_contiguous() for layer in cache.layers)
    assert cumem.tag_of(cache.layers[0]) == "kv_cache"
    del cache
    assert driver.used_bytes() == before


def test_a_layer_outlives_its_cache(driver: DriverUnderTest) -> None:
    layer = make_cache().layers[1]
    gc.collect()
    fill_pattern(layer, 4)
    assert tag_stats("kv_cache").segments == 1
    cumem.sleep(offload_tags=["kv_cache"])
    assert tag_stats("kv_cache").backup_bytes == layer.nbytes
    cumem.wake_up()
    del layer


# Blocks


def test_sequences_get_and_give_back_blocks() -> None:
    cache = make_cache(blocks=8)
    assert cache.allocate("a", 1) == (0,)
    assert cache.allocate("b", 33) == (1, 2, 3)
    assert cache.allocate("a", 16) == (0,)
    assert cache.allocate("a", 17) == (0, 4)
    assert (cache.blocks_of("a"), cache.free_blocks, cache.least_blocks) == ((0, 4), 3, 5)
    assert cache.sequences == ("a", "b")
    assert cache.free("b") == 3
    assert cache.allocate("c", 50) == (1, 2, 3, 5)
    table = cache.block_table(["c", "a"])
    assert (table.dtype, table.device.type) == (torch.int32, cache.device.type)
    assert table.tolist() == [[1, 2, 3, 5], [0, 4, -1, -1]]


def test_a_full_cache_allocates_nothing() -> None:
    cache = make_cache(blocks=4)
    cache.allocate("a", 40)
    with pytest.raises(cumem.NoBlocksError, match="2 more block"):
        cache.allocate("b", 32)
    with pytest.raises(cumem.NoBlocksError, match="1 of 4 free"):
        cache.allocate("a", 16 * 5)
    assert (cache.sequences, cache.blocks_of("a"), cache.free_blocks) == (("a",), (0, 1, 2), 1)


def test_unknown_sequences_are_refused() -> None:
    cache = make_cache(blocks=4)
    for call in (cache.free, cache.blocks_of, lambda name: cache.block_table([name])):
        with pytest.raises(ValueError, match="unknown sequence 'x'"):
            call("x")
    with pytest.raises(ValueError, match="at least one sequence"):
        cache.block_table([])


def test_many_threads_never_share_a_block() -> None:
    cache = make_cache(blocks=64)
    results: list[tuple[int, ...]] = []

    def work(name: int) -> None:
        for _ in range(50):
            results.append(cache.allocate((name, "kept"), 8 * 16))
            cache.allocate((name, "gone"), 32)
            cache.free((name, "gone"))

    threads = [threading.Thread(target=work, args=(name,)) for name in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    blocks = [block for name in range(4) for block in cache.blocks_of((name, "kept"))]
    assert len(blocks) == len(set(blocks)) == 32
    assert cache.free_blocks == 32


# Sleep


def test_a_discarding_sleep_forgets_every_sequence_and_moves_the_epoch(
    driver: DriverUnderTest,
) -> None:
    cache = make_cache()
    addresses = [layer.data_ptr() for layer in cache.layers]
    cache.allocate("a", 100)
    epoch, used = cumem.epoch("kv_cache"), driver.used_bytes()
    report = cumem.sleep()
    assert (report.offloaded_bytes, report.discarded_bytes) == (0, LAYERS * 7 * BLOCK)
    assert used - driver.used_bytes() == LAYERS * 64 * BLOCK
    assert (cumem.epoch("kv_cache"), cache.generation) == (epoch + 1, 1)
    assert (cache.sequences, cache.free_blocks) == ((), 64)
    with pytest.raises(ValueError, match="forgotten when the cache was reset"):
        cache.block_table(["a"])
    with pytest.raises(cumem.AsleepError, match="asleep"):
        cache.allocate("a", 1)
    cumem.wake_up()
    assert cache.allocate("b", 1) == (0,)
    assert [layer.data_ptr() for layer in cache.layers] == addresses
    fill_blocks(cache, (0, 63))
    assert blocks_hold(cache, (0, 63))


def test_an_offloading_sleep_keeps_the_blocks_in_use_and_copies_no_other() -> None:
    cache = make_cache(on_sleep="offload")
    cache.allocate("a", 40)
    cache.allocate("b", 40)
    cache.allocate("c", 40)
    cache.free("b")
    fill_blocks(cache, tuple(range(64)))
    used = cache.blocks_of("a") + cache.blocks_of("c")
    epoch = cumem.epoch("kv_cache")
    report = cumem.sleep()
    assert report.offloaded_bytes == report.copied_bytes == LAYERS * 6 * BLOCK
    assert report.discarded_bytes == 0
    cumem.wake_up(fill="zero")
    assert blocks_hold(cache, used)
    assert not any(bool(raw(layer[3:6]).any()) for layer in cache.layers), "what b had is gone"
    assert (cache.sequences, cache.generation) == (("a", "c"), 0)
    assert cumem.epoch("kv_cache") == epoch
    cache.allocate("a", 60)
    fill_blocks(cache, cache.blocks_of("a"), seed=5)
    cumem.sleep()
    cumem.wake_up(fill="zero")
    assert blocks_hold(cache, cache.blocks_of("a"), seed=5)
    assert blocks_hold(cache, cache.blocks_of("c"))


def test_level_2_forgets_an_offloading_cache_too() -> None:
    cache = make_cache(on_sleep="offload")
    cache.allocate("a", 40)
    cumem.sleep(level=2)
    assert (cache.sequences, cache.generation) == ((), 1)
    cumem.wake_up()


def test_a_kept_cache_stays_when_others_of_its_tag_are_discarded() -> None:
    kept, gone = make_cache(blocks=32, on_sleep="keep"), make_cache(blocks=32)
    kept.allocate("a", 40)
    gone.allocate("a", 40)
    fill_blocks(kept, (0, 1, 2))
    cumem.sleep()
    assert (kept.sequences, gone.sequences) == (("a",), ())
    assert blocks_hold(kept, (0, 1, 2))
    cumem.wake_up()


def test_the_books_count_only_blocks_in_use_as_live() -> None:
    cache = make_cache()
    assert tag_stats("kv_cache").live_bytes == 0
    cache.allocate("a", 40)
    assert tag_stats("kv_cache").live_bytes == LAYERS * 3 * BLOCK
    (device,) = cumem.report().devices
    assert device.tags[0].hole_bytes == LAYERS * 61 * BLOCK
    cumem.check()


@pytest.mark.needs("faults")
def test_a_failed_sleep_forgets_nothing(driver: DriverUnderTest) -> None:
    cache = make_cache(on_sleep="offload")
    cache.allocate("a", 40)
    fill_blocks(cache, (0, 1, 2))
    driver.emulator.fail("cuMemcpyDtoHAsync", code="CUDA_ERROR_UNKNOWN")
    with pytest.raises(cumem.DriverError):
        cumem.sleep()
    assert cache.sequences == ("a",)
    assert blocks_hold(cache, (0, 1, 2))


# Errors


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"blocks": 0}, ValueError, "blocks must be positive"),
        ({"layers": -1}, ValueError, "layers must be positive"),
        ({"block_size": 1.5}, TypeError, "block_size must be an int"),
        ({"blocks": "9"}, TypeError, "blocks must be an int, not '9'"),
        ({"layers": True}, TypeError, "layers must be an int, not True"),
        ({"chunk_bytes": "2MiB"}, TypeError, "chunk_bytes must be an int, not '2MiB'"),
        ({"chunk_bytes": 0}, ValueError, "chunk_bytes must be positive"),
        ({"tag": 1}, TypeError, "a tag must be a string, not int"),
        ({"on_sleep": 1}, TypeError, "on_sleep must be an OnSleep or a string"),
        ({"device": 1.5}, TypeError, "device must be"),
        ({"blocks": 9, "max_blocks": 8}, ValueError, "at least blocks"),
        ({"chunk_bytes": 5}, ValueError, "multiple of 2 MiB"),
        ({"chunk_bytes": 2**70}, ValueError, "addresses for so many"),
        ({"max_blocks": 2**60}, ValueError, "addresses for so many"),
        ({"on_sleep": "dream"}, ValueError, "unknown on_sleep"),
        ({"device": "cpu:9"}, ValueError, "no device"),
    ],
)
def test_wrong_arguments_allocate_nothing(
    options: dict[str, Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        make_cache(**options)
    assert cumem.stats().segment_bytes == 0


def test_a_dtype_by_name_is_refused() -> None:
    with pytest.raises(TypeError, match=r"dtype must be a torch\.dtype, not 'float16'"):
        cumem.PagedKVCache(
            layers=1,
            blocks=1,
            block_size=1,
            kv_heads=1,
            head_dim=1,
            dtype="float16",  # type: ignore[arg-type]
        )
    assert cumem.stats().segment_bytes == 0


def test_host_memory_for_blocks_is_taken_only_once_the_device_has_room(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def taken(blocks: int) -> None:
        raise AssertionError(f"a list of {blocks} blocks: the system ends the process")

    monkeypatch.setattr(paged_kv, "BlockTables", taken)
    with pytest.raises(cumem.DeviceOutOfMemoryError):
        make_cache(blocks=2**40)  # bytes, where blocks are wanted


def test_a_cache_without_room_leaves_no_layer_behind(driver: DriverUnderTest) -> None:
    blocks = int(driver.free_bytes() * 0.9) // BLOCK // (LAYERS - 1)
    with pytest.raises(cumem.DeviceOutOfMemoryError):
        make_cache(blocks=blocks)
    gc.collect()
    assert cumem.stats().physical_bytes == 0
