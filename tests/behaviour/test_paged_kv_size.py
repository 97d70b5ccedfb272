"""Does a paged cache change its size where it is, and nothing when it cannot?"""

from __future__ import annotations

import threading
from typing import Any

import pytest
from paged_kv_support import (
    BLOCK,
    LAYERS,
    blocks_hold,
    fill_blocks,
    make_cache,
    warm,  # noqa: F401 - pytest finds fixtures by name
)
from support import GRANULE, MIB, DriverUnderTest, in_thread

import cumem
from cumem import _resizing


def test_a_cache_grows_and_shrinks_where_it_is(driver: DriverUnderTest) -> None:
    before = driver.used_bytes()
    cache = make_cache(blocks=32, max_blocks=256)
    addresses = [layer.data_ptr() for layer in cache.layers]
    cache.allocate("a", 16 * 20)
    fill_blocks(cache, cache.blocks_of("a"))
    for blocks in (256, 64, 32, 96):
        cache.resize(blocks)
        assert driver.used_bytes() - before == LAYERS * blocks * BLOCK
        assert (cache.blocks, cache.free_blocks) == (blocks, blocks - 20)
        assert [layer.shape[0] for layer in cache.layers] == [blocks] * LAYERS
        assert [layer.data_ptr() for layer in cache.layers] == addresses
        assert blocks_hold(cache, cache.blocks_of("a"))
        cumem.check()
    fill_blocks(cache, (95,))
    assert blocks_hold(cache, (95,))
    assert len(cache.allocate("b", 16 * 76)) == 76


def test_sizes_that_are_no_whole_chunks_hand_out_no_more_blocks(driver: DriverUnderTest) -> None:
    before = driver.used_bytes()
    cache = make_cache(blocks=33, max_blocks=200)
    assert driver.used_bytes() - before == LAYERS * 2 * GRANULE
    cache.resize(65)
    assert (cache.blocks, cache.free_blocks) == (65, 65)
    assert driver.used_bytes() - before == LAYERS * 3 * GRANULE
    cache.resize(1)
    assert (cache.blocks, driver.used_bytes() - before) == (1, LAYERS * GRANULE)


def test_blocks_in_use_do_not_go() -> None:
    cache = make_cache(blocks=64)
    cache.allocate("a", 16 * 40)
    cache.allocate("b", 16)
    cache.free("a")
    assert cache.least_blocks == 41
    with pytest.raises(cumem.BusyError, match=r"in use by 'b'\. .* resize to 41 or more"):
        cache.resize(40)
    assert (cache.blocks, cache.free_blocks) == (64, 63)
    cache.resize(41)
    cache.free("b")
    cache.resize(32)
    assert cache.free_blocks == 32


def test_a_cache_sleeps_and_wakes_with_the_size_it_has(driver: DriverUnderTest) -> None:
    before = driver.used_bytes()
    cache = make_cache(blocks=32, max_blocks=128, on_sleep="offload")
    cache.allocate("a", 16 * 3)
    cumem.sleep()
    cumem.wake_up()
    cache.resize(96)
    cache.allocate("b", 16 * 80)
    fill_blocks(cache, (0, 1, 2, 81))
    cumem.sleep()
    assert driver.used_bytes() == before
    with pytest.raises(cumem.AsleepError):
        cache.resize(128)
    assert (cache.blocks, cache.free_blocks) == (96, 13)
    cumem.wake_up(fill="poison")
    assert blocks_hold(cache, (0, 1, 2, 81))
    cache.free("b")
    cache.resize(32)
    cumem.sleep()
    cumem.wake_up()
    assert blocks_hold(cache, (0, 1, 2))
    cumem.check()


def test_growth_without_room_changes_nothing(driver: DriverUnderTest) -> None:
    cache = make_cache(blocks=32, max_blocks=1024)
    cache.allocate("a", 40)
    fill_blocks(cache, (0, 1, 2))
    with driver.another_tenant(leaves=64 * MIB):
        used = driver.used_bytes()
        with pytest.raises(cumem.DeviceOutOfMemoryError, match="resize of tag 'kv_cache'"):
            cache.resize(1024)
        assert driver.used_bytes() == used
    assert (cache.blocks, cache.free_blocks) == (32, 29)
    assert blocks_hold(cache, (0, 1, 2))
    cumem.check()


@pytest.mark.needs("faults")
@pytest.mark.parametrize("call", ["cuMemCreate", "cuMemMap", "cuMemSetAccess"])
@pytest.mark.parametrize("nth", [1, 2, 5])
def test_a_refused_growth_changes_nothing(driver: DriverUnderTest, call: str, nth: int) -> None:
    cache = make_cache(blocks=32, max_blocks=96)
    cache.allocate("a", 40)
    fill_blocks(cache, (0, 1, 2))
    driver.emulator.fail(call, nth, "CUDA_ERROR_UNKNOWN")
    if nth == 5 and call == "cuMemSetAccess":
        cache.resize(96)  # once a layer
        driver.emulator.clear()
        return
    with pytest.raises(cumem.DriverError):
        cache.resize(96)
    assert (cache.blocks, cache.free_blocks, driver.used_bytes()) == (32, 29, LAYERS * GRANULE)
    assert blocks_hold(cache, (0, 1, 2))
    cumem.check()
    cache.resize(96)


@pytest.mark.needs("faults")
def test_a_refused_unmap_is_continued_by_the_same_call(driver: DriverUnderTest) -> None:
    cache = make_cache(blocks=96)
    driver.emulator.fail("cuMemUnmap", 2, "CUDA_ERROR_UNKNOWN")
    with pytest.raises(cumem.DriverError, match="the same call goes on"):
        cache.resize(32)
    assert (cache.blocks, cache.free_blocks) == (32, 32)
    cumem.check()
    assert driver.used_bytes() > LAYERS * GRANULE
    cache.resize(32)
    assert driver.used_bytes() == LAYERS * GRANULE


@pytest.mark.needs("captures")
def test_a_capture_is_not_broken_by_a_resize(driver: DriverUnderTest) -> None:
    cache = make_cache(blocks=32, max_blocks=64)
    driver.emulator.begin_capture()
    with pytest.raises(cumem.BusyError, match="capture"):
        cache.resize(64)
    driver.emulator.end_capture()
    assert (cache.blocks, cache.free_blocks) == (32, 32)
    cache.resize(64)


@pytest.mark.needs("streams")
def test_memory_goes_only_after_the_work_that_uses_it(driver: DriverUnderTest) -> None:
    cache = make_cache(blocks=64)
    last = cache.layers[0][63].data_ptr()
    driver.emulator.enqueue(write=(last, b"x" * BLOCK), delay=0.3)
    cache.resize(32)
    assert cache.blocks == 32


def test_a_sleep_of_another_thread_waits_for_a_resize() -> None:
    cache = make_cache(blocks=32, max_blocks=128)
    stop = threading.Event()

    def cycle() -> None:
        while not stop.is_set():
            cumem.sleep()
            cumem.wake_up()

    thread = threading.Thread(target=cycle)
    thread.start()
    try:
        for blocks in (128, 32) * 20:
            try:
                cache.resize(blocks)
            except cumem.AsleepError:
                continue
            assert cache.blocks == blocks
    finally:
        stop.set()
        thread.join(60)
    assert cache.free_blocks == cache.blocks
    in_thread(cumem.check)


def test_a_size_out_of_range_is_refused() -> None:
    cache = make_cache(blocks=32, max_blocks=64)
    with pytest.raises(ValueError, match="at most 64 are reserved"):
        cache.resize(65)
    with pytest.raises(ValueError, match="must be positive"):
        cache.resize(0)
    assert cache.blocks == 32


def test_a_resize_that_ends_leaves_blocks_alone_that_another_is_to_take(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    cache = make_cache(blocks=128)
    resize = _resizing.resize

    def waits_for_another(segments: Any, size: int, settled: Any) -> None:
        monkeypatch.setattr(_resizing, "resize", resize)
        cache.resize(96)
        with pytest.raises(cumem.NoBlocksError):
            cache.allocate("a", 16 * 40)
        resize(segments, size, settled)

    monkeypatch.setattr(_resizing, "resize", waits_for_another)
    cache.resize(32)
    assert (cache.blocks, cache.free_blocks) == (32, 32)
    cache.resize(64)
    assert cache.free_blocks == 64
