"""Which allocations belong to which tag, however scopes are opened and left?"""

from __future__ import annotations

import gc
import itertools
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack

import pytest
import torch
from support import DriverUnderTest, holds_pattern, in_thread, make, tag_stats

import cumem

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


def test_a_scope_object_serves_once() -> None:
    cumem.configure(cumem.Options(warn_empty_scope=False))
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
