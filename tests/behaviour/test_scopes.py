"""Which allocations belong to which tag, however scopes are opened and left?"""

from __future__ import annotations

import gc
import itertools
import threading
import warnings
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack

import pytest
import torch
from support import (
    GRANULE,
    MIB,
    DriverUnderTest,
    holds_pattern,
    in_thread,
    make,
    memory_at,
    tag_stats,
)

import cumem


@pytest.fixture
def quiet() -> None:
    """Scopes may end empty."""
    cumem.configure(cumem.Options(warn_empty_scope=False))


# Ways to open a scope


def test_a_scope_captures_what_is_made_in_it_and_nothing_else(driver: DriverUnderTest) -> None:
    before = torch.ones(10, device=driver.device)
    with cumem.use_memory_pool("weights"):
        inside = make(10)
    after = torch.ones(10, device=driver.device)
    assert [cumem.tag_of(tensor) for tensor in (before, inside, after)] == [None, "weights", None]


def test_a_scope_without_a_tag_is_of_the_default_tag() -> None:
    with cumem.use_memory_pool() as pool:
        tensor = make(10)
    assert pool.tag == cumem.tag_of(tensor) == "default"


def test_a_pool_says_what_it_is(driver: DriverUnderTest) -> None:
    with cumem.use_memory_pool("weights", on_sleep="keep") as pool:
        tensor = make(10)
    assert (pool.tag, pool.on_sleep) == ("weights", cumem.OnSleep.KEEP)
    assert (pool.device.type, pool.device.index) == (driver.device.type, 0)
    assert repr(pool) == f"Pool(tag='weights', device={pool.device}, on_sleep='keep')"
    del tensor


def test_a_scope_works_through_an_exit_stack() -> None:
    with ExitStack() as stack:
        pool = stack.enter_context(cumem.use_memory_pool("weights"))
        tensor = make(1000)
        assert pool.captured_bytes == 1024
    assert cumem.tag_of(tensor) == "weights"


def test_a_scope_combines_with_torch_device(driver: DriverUnderTest) -> None:
    with cumem.use_memory_pool("weights"), torch.device(driver.device):
        first = torch.nn.Linear(4, 4)
    with torch.device(driver.device), cumem.use_memory_pool("weights"):
        second = torch.nn.Linear(4, 4)
    assert cumem.covered(first) == cumem.covered(second) == []


def test_a_scope_decorates_a_function_for_any_number_of_calls() -> None:
    @cumem.use_memory_pool("weights")
    def build(size: int, depth: int = 0) -> list[torch.Tensor]:
        """Docs."""
        deeper = build(size, depth - 1) if depth else []
        return [make(size, size), *deeper]

    tensors = [*build(100), *build(200, depth=2)]
    assert {cumem.tag_of(tensor) for tensor in tensors} == {"weights"}
    assert (build.__name__, build.__doc__) == ("build", "Docs.")


def test_a_decorated_function_runs_on_several_threads() -> None:
    @cumem.use_memory_pool("weights")
    def build(seed: int) -> torch.Tensor:
        return make(3000, seed)

    with ThreadPoolExecutor(4) as executor:
        tensors = list(executor.map(build, range(16)))
    assert {cumem.tag_of(tensor) for tensor in tensors} == {"weights"}
    assert all(holds_pattern(tensor, seed) for seed, tensor in enumerate(tensors))


def test_a_scope_object_serves_once(quiet: None) -> None:
    scope = cumem.use_memory_pool("weights")
    with scope, pytest.raises(RuntimeError, match="entered once"), scope:
        pass
    with pytest.raises(RuntimeError, match="entered once"):
        scope.__enter__()
    cumem.sleep(tags=["weights"])


def test_an_exception_in_the_body_leaves_no_scope_behind(driver: DriverUnderTest) -> None:
    kept = []

    def fail() -> None:
        with cumem.use_memory_pool("weights"):
            kept.append(make(100))
            raise KeyError

    with pytest.raises(KeyError):
        fail()
    outside = torch.ones(10, device=driver.device)
    assert cumem.tag_of(outside) is None
    cumem.sleep()
    cumem.wake_up()
    assert holds_pattern(kept.pop())


def test_an_exception_in_an_inner_scope_leaves_the_outer_one_open() -> None:
    with cumem.use_memory_pool("outer"):
        with pytest.raises(KeyError), cumem.use_memory_pool("inner"):
            raise KeyError
        tensor = make(10)
    assert cumem.tag_of(tensor) == "outer"


# Nesting


def test_nested_scopes_keep_their_own_tags() -> None:
    with cumem.use_memory_pool("weights"):
        first = make(10)
        with cumem.use_memory_pool("kv_cache"):
            second = make(10)
        third = make(10)
    assert [cumem.tag_of(tensor) for tensor in (first, second, third)] == [
        "weights",
        "kv_cache",
        "weights",
    ]


def test_a_scope_nested_in_one_of_its_own_tag_has_another_pool() -> None:
    with cumem.use_memory_pool("weights") as outer:
        first = make(10, 1)
        with cumem.use_memory_pool("weights") as inner:
            second = make(10, 2)
        third = make(10, 3)
    assert outer.id != inner.id
    assert (outer.live_bytes, inner.live_bytes) == (1024, 512)
    cumem.sleep()
    cumem.wake_up()
    assert all(
        holds_pattern(tensor, seed + 1) for seed, tensor in enumerate((first, second, third))
    )


@pytest.mark.parametrize("order", list(itertools.permutations(range(3))), ids=str)
def test_scopes_may_be_left_in_any_order(driver: DriverUnderTest, order: tuple[int, ...]) -> None:
    tags = ["a", "b", "a"]
    scopes = [cumem.use_memory_pool(tag) for tag in tags]
    kept = []
    for scope, tag in zip(scopes, tags, strict=True):
        scope.__enter__()
        kept.append(make(10))
        assert cumem.tag_of(kept[-1]) == tag
    still_open = [0, 1, 2]
    for index in order:
        scopes[index].__exit__(None, None, None)
        still_open.remove(index)
        kept.append(torch.ones(10, device=driver.device))
        assert cumem.tag_of(kept[-1]) == (tags[still_open[-1]] if still_open else None)
    cumem.sleep()
    cumem.wake_up()


def test_a_scope_in_a_forgotten_generator_ends_with_it(driver: DriverUnderTest) -> None:
    def build() -> object:
        with cumem.use_memory_pool("weights"):
            yield make(10)

    generator = build()
    tensor = next(generator)
    del generator
    gc.collect()
    assert cumem.tag_of(torch.ones(10, device=driver.device)) is None
    cumem.sleep()
    cumem.wake_up()
    assert holds_pattern(tensor)


def test_a_pool_is_used_again_by_the_next_scope() -> None:
    with cumem.use_memory_pool("weights") as first:
        one = make(10)
    with cumem.use_memory_pool("weights") as second:
        two = make(10)
    assert first.id == second.id
    assert tag_stats("weights").segments == 1
    del one, two


# Threads


def test_other_threads_are_not_captured(driver: DriverUnderTest) -> None:
    with cumem.use_memory_pool("weights"):
        inside = make(10)
        outside = in_thread(lambda: torch.ones(10, device=driver.device))
    assert (cumem.tag_of(inside), cumem.tag_of(outside)) == ("weights", None)


def test_threads_have_scopes_of_their_own() -> None:
    barrier = threading.Barrier(4)

    def work(index: int) -> torch.Tensor:
        with cumem.use_memory_pool(f"tag_{index}"):
            barrier.wait(60)
            tensor = make(5000, index)
            barrier.wait(60)
        return tensor

    with ThreadPoolExecutor(4) as executor:
        tensors = list(executor.map(work, range(4)))
    assert [cumem.tag_of(tensor) for tensor in tensors] == [f"tag_{index}" for index in range(4)]
    cumem.sleep()
    cumem.wake_up()
    assert all(holds_pattern(tensor, seed) for seed, tensor in enumerate(tensors))


def test_two_threads_in_one_tag_at_once_have_a_pool_each() -> None:
    barrier = threading.Barrier(2)

    def work(seed: int) -> tuple[torch.Tensor, tuple[int, int]]:
        with cumem.use_memory_pool("weights") as pool:
            barrier.wait(60)
            tensor = make(5000, seed)
            barrier.wait(60)
            return tensor, pool.id

    with ThreadPoolExecutor(2) as executor:
        (one, first), (two, second) = executor.map(work, (1, 2))
    assert first != second
    cumem.sleep()
    cumem.wake_up()
    assert holds_pattern(one, 1)
    assert holds_pattern(two, 2)


def test_a_pool_may_be_used_again_by_another_thread() -> None:
    def work() -> tuple[torch.Tensor, tuple[int, int]]:
        with cumem.use_memory_pool("weights") as pool:
            return make(100), pool.id

    one, first = work()
    two, second = in_thread(work)
    assert first == second
    assert cumem.tag_of(one) == cumem.tag_of(two) == "weights"


def test_a_scope_left_on_another_thread_is_an_error_and_is_closed() -> None:
    scope = cumem.use_memory_pool("weights")
    scope.__enter__()
    tensor = make(10)
    with pytest.raises(RuntimeError, match="another thread"):
        in_thread(lambda: scope.__exit__(None, None, None))
    with cumem.use_memory_pool("other"):
        other = make(10)
    assert cumem.tag_of(other) == "other"
    cumem.sleep()
    cumem.wake_up()
    assert holds_pattern(tensor)


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


def test_the_warning_can_be_switched_off(quiet: None) -> None:
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
