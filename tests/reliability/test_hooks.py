"""Who is told when memory goes and comes back, when, and of what?"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from hooks_on_trial import Hooks, Segments, fail
from support import (
    GRANULE,
    MIB,
    holds_pattern,
    make,
    memory_at,
    pattern,
)

import cumem


def test_hooks_are_called_once_a_call_in_the_order_of_their_registration(hooks: Hooks) -> None:
    for name in ("first", "second", "third"):
        hooks.before(f"{name} before")
        hooks.after(f"{name} after")
    with cumem.use_memory_pool("weights"):
        tensors = [make(30 * MIB, 1), make(100, 2)]
    cumem.sleep()
    assert hooks.names == ["first before", "second before", "third before"]
    cumem.wake_up()
    assert hooks.names[3:] == ["first after", "second after", "third after"]
    del tensors


def test_hooks_are_told_of_the_segments_that_move_and_of_no_others(hooks: Hooks) -> None:
    hooks.before()
    hooks.after()
    tensors = {}
    for tag in ("weights", "draft"):
        with cumem.use_memory_pool(tag):
            tensors[tag] = [make(30 * MIB), make(100)]
    cumem.sleep(tags=["weights"])
    ((_, told),) = hooks.calls
    large, small = tensors["weights"]
    assert [(one.address, one.bytes) for one in told] == [
        (large.data_ptr(), 30 * MIB),
        (small.data_ptr(), GRANULE),
    ]
    assert {(one.tag, one.device) for one in told} == {("weights", 0)}
    cumem.sleep()
    cumem.wake_up(["draft"])
    assert hooks.tags_of("before") == [{"weights"}, {"draft"}]
    assert hooks.tags_of("after") == [{"draft"}]
    cumem.wake_up()
    assert hooks.tags_of("after") == [{"draft"}, {"weights"}]


def test_hooks_are_not_called_when_there_is_nothing_to_do(hooks: Hooks) -> None:
    hooks.before()
    hooks.after()
    cumem.sleep()
    cumem.wake_up()
    with cumem.use_memory_pool("weights"):
        tensor = make(100)
    cumem.wake_up()
    cumem.sleep(level=0)
    cumem.sleep(tags=[])
    cumem.plan_sleep()
    assert hooks.calls == []
    cumem.sleep()
    cumem.sleep()
    cumem.wake_up()
    cumem.wake_up()
    assert hooks.names == ["before", "after"]
    del tensor


def test_hooks_are_not_called_by_a_call_that_is_refused(hooks: Hooks) -> None:
    hooks.before()
    hooks.after()
    with cumem.use_memory_pool("weights"):
        tensor = make(100)
        with pytest.raises(cumem.BusyError):
            cumem.sleep()
    with pytest.raises(ValueError, match="unknown tag"):
        cumem.sleep(tags=["wieghts"])
    assert hooks.calls == []
    del tensor


@pytest.mark.needs("memory that the host can read")
def test_memory_is_there_with_its_contents_while_hooks_run(hooks: Hooks) -> None:
    seen: list[bool] = []

    def look(segments: Segments) -> None:
        for one in segments:
            assert memory_at(one.address, one.bytes).numel() == one.bytes
            seen.append(torch.equal(memory_at(one.address, 5000), pattern(5000, 7)))

    hooks.before(action=look)
    hooks.after(action=look)
    with cumem.use_memory_pool("weights"):
        tensor = make(5000, 7)
    cumem.sleep()
    cumem.wake_up()
    assert seen == [True, True]
    del tensor


def test_what_a_hook_writes_before_the_unmap_is_in_the_backup(hooks: Hooks) -> None:
    with cumem.use_memory_pool("weights"):
        tensor = make(5000, 1)
    hooks.before(action=lambda _: tensor.fill_(7))
    for _ in range(2):
        cumem.sleep()
        cumem.wake_up()
        assert set(tensor.tolist()) == {7}


def test_contents_are_valid_for_every_tag_when_the_after_hooks_run(hooks: Hooks) -> None:
    """dynamo#10319: a path of its own skipped what has to run after every wake."""
    tensors = {}
    for seed, tag in enumerate(("weights", "draft")):
        with cumem.use_memory_pool(tag):
            tensors[tag] = make(5000, seed)
    hooks.after(
        action=lambda _: (
            [holds_pattern(tensors["weights"], 0), holds_pattern(tensors["draft"], 1)]
            == [True, True]
            or fail(())
        )
    )
    cumem.sleep()
    cumem.wake_up()
    assert hooks.tags_of("after") == [{"weights", "draft"}]


def test_a_removed_hook_is_not_called_and_may_be_removed_again(hooks: Hooks) -> None:
    calls: list[str] = []
    first = cumem.on_before_unmap(lambda _: calls.append("first"))
    second = cumem.on_before_unmap(lambda _: calls.append("second"))
    with cumem.use_memory_pool("weights"):
        tensor = make(100)
    first.remove()
    first.remove()
    cumem.sleep()
    assert calls == ["second"]
    second.remove()
    cumem.wake_up()
    cumem.sleep()
    assert calls == ["second"]
    cumem.wake_up()
    del tensor


def test_a_hook_that_removes_itself_does_not_disturb_the_others() -> None:
    calls: list[str] = []
    handles: list[cumem.HookHandle] = []

    def once(_segments: Segments) -> None:
        calls.append("once")
        handles[0].remove()

    handles.append(cumem.on_after_map(once))
    handles.append(cumem.on_after_map(lambda _: calls.append("always")))
    with cumem.use_memory_pool("weights"):
        tensor = make(100)
    for _ in range(2):
        cumem.sleep()
        cumem.wake_up()
    handles[1].remove()
    assert calls == ["once", "always", "always"]
    del tensor


def test_one_function_registered_twice_is_two_hooks(hooks: Hooks) -> None:
    calls: list[str] = []

    def hook(_segments: Segments) -> None:
        calls.append("called")

    first, second = cumem.on_before_unmap(hook), cumem.on_before_unmap(hook)
    with cumem.use_memory_pool("weights"):
        tensor = make(100)
    cumem.sleep()
    assert len(calls) == 2
    first.remove()
    first.remove()  # takes back its own registration only
    cumem.wake_up()
    cumem.sleep()
    assert len(calls) == 3
    second.remove()
    cumem.wake_up()
    del tensor


@pytest.mark.parametrize("register", [cumem.on_before_unmap, cumem.on_after_map])
def test_a_hook_that_cannot_be_called_is_a_type_error(register: Callable[..., object]) -> None:
    with pytest.raises(TypeError, match="callable"):
        register("hook")
