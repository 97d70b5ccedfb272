"""Do scopes of emulated pools nest, and capture what is made in them and nothing else?"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from fake_plugin import FakePlugin, in_thread, live, ramp
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode_stack

from cumem._emulated_pool import EmulatedMemPool, use_emulated_pool


def test_the_innermost_scope_wins(plugin: FakePlugin) -> None:
    pools = [EmulatedMemPool(plugin.functions, 0) for _ in range(3)]
    with use_emulated_pool(pools[0]):
        first = torch.ones(1000)
        with use_emulated_pool(pools[1]):
            second = torch.ones(3000)
        third = torch.ones(5000)
    fourth = torch.ones(7000)
    assert [live(pool) for pool in pools] == [[4096, 20480], [12288], []]
    assert not plugin.holds(fourth)
    assert [plugin.holds(tensor) for tensor in (first, second, third)] == [True] * 3


def test_a_pool_cannot_be_entered_twice_at_once(pool: EmulatedMemPool) -> None:
    errors: list[str] = []

    def enter() -> None:
        try:
            with use_emulated_pool(pool):
                errors.append("none")
        except RuntimeError as error:
            errors.append(str(error))

    with use_emulated_pool(pool):
        enter()
        in_thread(enter)
        assert pool.use_count() == 2
    assert ["already recording" in error for error in errors] == [True, True]
    assert pool.use_count() == 1
    enter()
    assert errors[-1] == "none"


def test_scopes_may_be_left_in_any_order(plugin: FakePlugin) -> None:
    first, second = (EmulatedMemPool(plugin.functions, 0) for _ in range(2))
    outer, inner = contextlib.ExitStack(), contextlib.ExitStack()
    outer.enter_context(use_emulated_pool(first))
    inner.enter_context(use_emulated_pool(second))
    outer.close()
    kept = torch.ones(1000)
    assert (live(first), live(second)) == ([], [4096])
    inner.close()
    assert not plugin.holds(torch.ones(10))
    assert _get_current_dispatch_mode_stack() == []
    del kept


class Counting(TorchDispatchMode):
    ops = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.ops += 1
        return func(*args, **(kwargs or {}))


def test_a_scope_may_be_left_under_another_dispatch_mode(
    plugin: FakePlugin, pool: EmulatedMemPool
) -> None:
    scope = contextlib.ExitStack()
    scope.enter_context(use_emulated_pool(pool))
    with Counting() as counting:
        inside = torch.ones(10)
        scope.close()
        outside = torch.ones(10)
        assert _get_current_dispatch_mode_stack()[-1] is counting
    assert counting.ops == 2
    assert (plugin.holds(inside), plugin.holds(outside)) == (True, False)
    with use_emulated_pool(pool):
        assert plugin.holds(torch.ones(10))
    assert _get_current_dispatch_mode_stack() == []


def test_a_suspended_generator_may_be_closed_by_another_thread(
    plugin: FakePlugin, pool: EmulatedMemPool
) -> None:
    def suspended() -> Iterator[torch.Tensor]:
        with use_emulated_pool(pool):
            yield torch.ones(10)

    generator = suspended()
    assert plugin.holds(next(generator))
    in_thread(generator.close)  # type: ignore[attr-defined]
    assert not plugin.holds(torch.ones(10))
    assert pool.use_count() == 1
    with use_emulated_pool(pool):
        assert plugin.holds(torch.ones(10))


def test_a_scope_may_be_opened_inside_an_operator(
    plugin: FakePlugin, pool: EmulatedMemPool
) -> None:
    inner = EmulatedMemPool(plugin.functions, 0)
    made: list[torch.Tensor] = []

    @torch.library.custom_op("cumem_test::opens_a_scope", mutates_args=())
    def opens_a_scope(tensor: torch.Tensor) -> torch.Tensor:
        with use_emulated_pool(inner):
            made.append(tensor * 2)
        return tensor + 1

    with use_emulated_pool(pool):
        result = opens_a_scope(ramp(1000))
        assert len(_get_current_dispatch_mode_stack()) == 1
    assert _get_current_dispatch_mode_stack() == []
    assert (live(pool), live(inner)) == ([8192], [8192])
    assert torch.equal(result - 1, ramp(1000))


def test_an_exception_ends_the_scope(plugin: FakePlugin, pool: EmulatedMemPool) -> None:
    with pytest.raises(KeyError), use_emulated_pool(pool):
        raise KeyError
    assert not plugin.holds(torch.ones(10))
    assert pool.use_count() == 1


def test_other_threads_are_not_captured(plugin: FakePlugin, pool: EmulatedMemPool) -> None:
    made: list[torch.Tensor] = []
    with use_emulated_pool(pool):
        in_thread(lambda: made.append(torch.ones(10)))
        mode = _get_current_dispatch_mode_stack()[0]

        def under_a_mode_that_torch_handed_on() -> None:
            with mode:
                made.append(torch.ones(10))

        in_thread(under_a_mode_that_torch_handed_on)
    assert [plugin.holds(tensor) for tensor in made] == [False, False]
