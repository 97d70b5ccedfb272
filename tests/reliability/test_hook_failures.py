"""What is left when a hook raises, a call fails after its hooks, or a hook calls back?"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from hooks_on_trial import Hooks, Segments, fail
from support import (
    GRANULE,
    MIB,
    DriverUnderTest,
    holds_pattern,
    make,
    state,
)

import cumem


def test_a_hook_that_raises_before_the_unmap_keeps_everything_awake(hooks: Hooks) -> None:
    with cumem.use_memory_pool("weights"):
        tensor = make(5000, 1)
    hooks.before("good")
    hooks.before("bad", fail)
    hooks.before("never")
    hooks.after("again")
    before = state()
    with pytest.raises(cumem.CumemError, match="Nothing was put to sleep") as caught:
        cumem.sleep()
    assert isinstance(caught.value.__cause__, KeyError)
    assert "fail" in str(caught.value) or "hook" in str(caught.value)
    assert state() == before
    assert hooks.names == ["good", "bad", "again"]
    assert holds_pattern(tensor, 1)
    hooks.remove()
    cumem.sleep()
    cumem.wake_up()
    assert holds_pattern(tensor, 1)


def test_a_hook_that_raises_after_the_map_leaves_everything_awake(hooks: Hooks) -> None:
    with cumem.use_memory_pool("weights"):
        tensor = make(5000, 1)
    hooks.after("bad", fail)
    hooks.after("good")
    cumem.sleep()
    with pytest.raises(cumem.CumemError, match="is awake and its contents valid") as caught:
        cumem.wake_up()
    assert isinstance(caught.value.__cause__, KeyError)
    assert hooks.names == ["bad", "good"]
    assert not cumem.is_sleeping()
    assert holds_pattern(tensor, 1)
    assert cumem.wake_up().tags == frozenset()


def test_a_wake_that_fails_calls_no_hook(driver: DriverUnderTest, hooks: Hooks) -> None:
    with cumem.use_memory_pool("weights"):
        tensor = make(20 * MIB, 1)
    hooks.after()
    cumem.sleep()
    with driver.another_tenant(leaves=GRANULE), pytest.raises(cumem.DeviceOutOfMemoryError):
        cumem.wake_up()
    assert hooks.calls == []
    cumem.wake_up()
    assert hooks.names == ["after"]
    assert holds_pattern(tensor, 1)


def test_who_was_told_of_a_sleep_that_failed_is_told_that_memory_stayed(hooks: Hooks) -> None:
    cumem.configure(cumem.Options(host_limit_bytes=MIB))
    with cumem.use_memory_pool("weights"):
        tensor = make(5 * MIB, 1)
    hooks.before()
    hooks.after()
    with pytest.raises(cumem.HostOutOfMemoryError):
        cumem.sleep()
    assert hooks.names == ["before", "after"]
    assert hooks.calls[0][1] == hooks.calls[1][1]
    assert holds_pattern(tensor, 1)


@pytest.mark.needs("failures on request")
@pytest.mark.parametrize("nth", [1, 2])  # each segment is unmapped at least once
def test_a_sleep_that_goes_on_tells_hooks_of_memory_that_is_whole_and_of_no_other(
    driver: DriverUnderTest, hooks: Hooks, nth: int
) -> None:
    cumem.configure(cumem.Options(chunk_bytes=10 * MIB))
    with cumem.use_memory_pool("weights"):
        tensors = [make(20 * MIB, seed) for seed in range(2)]
    places = {tensor.data_ptr(): tensor for tensor in tensors}
    hooks.before(
        action=lambda told: [fail(()) for one in told if not cumem.is_mapped(places[one.address])]
    )
    driver.emulator.fail("cuMemUnmap", nth=nth, code="CUDA_ERROR_UNKNOWN")
    with pytest.raises(cumem.DriverError):
        cumem.sleep()
    cumem.sleep()
    cumem.wake_up()
    assert all(holds_pattern(tensor, seed) for seed, tensor in enumerate(tensors))


# Calls from inside a hook


@pytest.mark.parametrize("kind", ["before", "after"])
@pytest.mark.parametrize(
    "call", [cumem.sleep, cumem.wake_up, lambda: cumem.use_memory_pool("weights").__enter__()]
)
def test_a_hook_cannot_start_another_move(
    hooks: Hooks, kind: str, call: Callable[[], object]
) -> None:
    errors: list[BaseException] = []

    def reenter(_segments: Segments) -> None:
        with pytest.raises(cumem.BusyError, match="hook") as caught:
            call()
        errors.append(caught.value)

    getattr(hooks, kind)(action=reenter)
    with cumem.use_memory_pool("weights"):
        tensor = make(5000, 1)
    cumem.sleep()
    assert cumem.sleeping_tags() == {"weights"}
    cumem.wake_up()
    assert len(errors) == 1
    assert holds_pattern(tensor, 1)


def test_a_hook_may_ask_and_may_open_a_scope_of_another_tag(hooks: Hooks) -> None:
    made: list[torch.Tensor] = []

    def work(segments: Segments) -> None:
        assert not cumem.is_sleeping()
        assert cumem.stats().segment_bytes >= segments[0].bytes
        with cumem.use_memory_pool("staging"):
            made.append(make(100, 5))

    hooks.before(action=work)
    with cumem.use_memory_pool("weights"):
        tensor = make(5000, 1)
    cumem.sleep(tags=["weights"])
    cumem.wake_up()
    assert holds_pattern(made.pop(), 5)
    assert holds_pattern(tensor, 1)
