"""Which pool does a scope get, what does it say of its memory, and when does it warn?"""

from __future__ import annotations

import warnings

import pytest
import torch
from support import GRANULE, MIB, DriverUnderTest, holds_pattern, in_thread, make, memory_at

import cumem

# A tag that is asleep


def test_a_scope_of_a_sleeping_tag_gets_fresh_memory(driver: DriverUnderTest) -> None:
    with cumem.use_memory_pool("weights") as first:
        old = make(1000, 1)
    cumem.sleep()
    with cumem.use_memory_pool("weights") as second:
        new = make(1000, 2)
    assert second.id != first.id
    assert (cumem.is_mapped(old), cumem.is_mapped(new)) == (False, True)
    assert cumem.sleeping_tags() == {"weights"}
    assert holds_pattern(new, 2)
    assert cumem.wake_up().mapped_bytes == GRANULE
    assert holds_pattern(old, 1)
    assert holds_pattern(new, 2)


def test_what_was_made_beside_sleeping_memory_sleeps_next_time() -> None:
    with cumem.use_memory_pool("weights"):
        old = make(1000, 1)
    cumem.sleep()
    with cumem.use_memory_pool("weights"):
        new = make(1000, 2)
    report = cumem.sleep()
    assert (report.freed_bytes, report.offloaded_bytes) == (GRANULE, 1024)
    assert cumem.wake_up().mapped_bytes == 2 * GRANULE
    assert holds_pattern(old, 1)
    assert holds_pattern(new, 2)


def test_the_pool_is_used_again_once_it_is_awake() -> None:
    with cumem.use_memory_pool("weights") as first:
        old = make(1000)
    cumem.sleep()
    cumem.wake_up()
    with cumem.use_memory_pool("weights") as second:
        new = make(1000)
    assert first.id == second.id
    del old, new


# What a pool says about its memory


def test_a_pool_counts_its_segments_and_live_bytes() -> None:
    with cumem.use_memory_pool("weights") as pool:
        assert (pool.segments, pool.segment_bytes, pool.live_bytes) == (0, 0, 0)
        small, large = make(700), make(30 * MIB)
        assert pool.segments == 2
        assert pool.segment_bytes == 32 * MIB
        assert pool.live_bytes == pool.captured_bytes == 30 * MIB + 1024
        del small
        assert pool.live_bytes == 30 * MIB
    cumem.sleep()
    assert (pool.segments, pool.segment_bytes, pool.live_bytes) == (2, 32 * MIB, 30 * MIB)
    cumem.wake_up()
    del large
    cumem.trim()
    assert (pool.segments, pool.segment_bytes, pool.live_bytes) == (0, 0, 0)


def test_captured_bytes_are_those_of_this_scope() -> None:
    with cumem.use_memory_pool("weights") as first:
        one = make(700)
    with cumem.use_memory_pool("weights") as second:
        assert second.captured_bytes == 0
        two = make(512)
        assert (second.captured_bytes, second.live_bytes) == (512, 1536)
    assert first.captured_bytes == 1536
    del one, two


def test_a_tensor_in_the_place_of_a_dead_one_cannot_be_told_from_it() -> None:
    with cumem.use_memory_pool("weights"):
        old = make(700)
        place = old.data_ptr()
    with cumem.use_memory_pool("weights") as pool:
        del old
        new = make(700)
        fresh = make(700)
        assert new.data_ptr() == place
        assert pool.captured_bytes == 1024  # of `fresh` alone
    del fresh, new


def test_the_id_of_a_trimmed_pool_is_an_error() -> None:
    with cumem.use_memory_pool("weights") as pool:
        tensor = make(10)
    cumem.trim()
    with pytest.raises(RuntimeError, match="trim"):
        _ = pool.id
    assert pool.segments == 1
    del tensor


# Empty scopes


def test_a_scope_that_captured_nothing_warns(driver: DriverUnderTest) -> None:
    with (
        pytest.warns(UserWarning, match="nothing was captured by this scope of tag 'weights'"),
        cumem.use_memory_pool("weights"),
    ):
        in_thread(lambda: torch.ones(10, device=driver.device))


def test_the_warning_points_at_the_scope_in_the_caller() -> None:
    with pytest.warns(UserWarning, match="nothing") as caught, cumem.use_memory_pool("weights"):
        pass
    assert caught[0].filename == __file__


def test_a_full_scope_and_one_left_by_an_exception_do_not_warn() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with cumem.use_memory_pool("weights"):
            tensor = make(10)
        with pytest.raises(KeyError), cumem.use_memory_pool("weights"):
            raise KeyError
    del tensor


def test_the_warning_can_be_switched_off() -> None:
    cumem.configure(cumem.Options(warn_empty_scope=False))
    with cumem.use_memory_pool("weights"):
        pass


# Pools of graphs


def test_a_graph_pool_has_an_id_and_routes_nothing(driver: DriverUnderTest) -> None:
    with cumem.graph_pool() as pool:
        outside = torch.ones(10, device=driver.device)
        assert len(pool.id) == 2
    assert pool.tag == "cuda_graph"
    assert cumem.tag_of(outside) is None


def test_every_graph_pool_is_a_pool_of_its_own() -> None:
    with cumem.graph_pool("graphs") as first, cumem.graph_pool("graphs") as second:
        assert first.id != second.id


def test_a_graph_pool_takes_a_policy() -> None:
    with cumem.graph_pool("graphs", on_sleep="keep") as pool:
        assert pool.on_sleep is cumem.OnSleep.KEEP


@pytest.mark.needs("capture without kernels")
def test_the_whole_segment_of_a_pool_entered_inside_a_capture_is_live(
    driver: DriverUnderTest,
) -> None:
    driver.emulator.begin_capture()
    with cumem.use_memory_pool("graphs"):
        result, intermediate = make(512, 1), make(4096, 2)
        place = intermediate.data_ptr() - result.data_ptr()
        del intermediate
    driver.emulator.end_capture()
    report = cumem.sleep()
    assert report.offloaded_bytes == GRANULE
    assert cumem.trim() == 0
    cumem.wake_up()
    assert holds_pattern(result, 1)
    assert holds_pattern(memory_at(result.data_ptr() + place, 4096), 2)
