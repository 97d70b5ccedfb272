"""Who is told when memory goes and comes back, and what stops a use of memory that is away?"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

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
    pattern,
    state,
)

import cumem

Segments = tuple[cumem.SegmentRange, ...]


class Hooks:
    """Registers hooks, notes every call in order, and takes them all back."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, Segments]] = []
        self._handles: list[cumem.HookHandle] = []

    def before(self, name: str = "before", action: Callable[[Segments], Any] | None = None) -> None:
        self._add(cumem.on_before_unmap, name, action)

    def after(self, name: str = "after", action: Callable[[Segments], Any] | None = None) -> None:
        self._add(cumem.on_after_map, name, action)

    def _add(self, register: Any, name: str, action: Callable[[Segments], Any] | None) -> None:
        def hook(segments: Segments) -> None:
            self.calls.append((name, segments))
            if action is not None:
                action(segments)

        self._handles.append(register(hook))

    @property
    def names(self) -> list[str]:
        return [name for name, _ in self.calls]

    def tags_of(self, name: str) -> list[set[str]]:
        return [{one.tag for one in segments} for told, segments in self.calls if told == name]

    def remove(self) -> None:
        while self._handles:  # which hold the tensors of the test
            self._handles.pop().remove()


@pytest.fixture
def hooks() -> Iterator[Hooks]:
    registered = Hooks()
    yield registered
    registered.remove()


def fail(_segments: Segments) -> None:
    raise KeyError("mine")


# Order, number and arguments


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


# Exceptions


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
@pytest.mark.parametrize("nth", [1, 2, 3, 4])
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


# The guard


class Layer(torch.nn.Module):
    """A parameter, and a count of the calls that went through."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(8, 8))
        self.calls = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return x @ self.weight


def guarded_model() -> tuple[torch.nn.Sequential, Any, torch.Tensor]:
    device = cumem.default_device()
    with cumem.use_memory_pool("weights"), torch.device(device):
        model = torch.nn.Sequential(Layer(), Layer())
    with cumem.use_memory_pool("adapter"), torch.device(device):
        model[1].register_buffer("scale", torch.ones(8))
    return model, cumem.guard(model), torch.ones(2, 8, device=device)


@torch.no_grad()
def test_a_call_of_a_sleeping_module_is_an_error_that_names_tag_and_parameter() -> None:
    """vllm-omni#4473, kvcached#211: a call while part of the model is away."""
    model, _, x = guarded_model()
    expected = model(x)
    cumem.sleep(tags=["weights"])
    with pytest.raises(cumem.AsleepError) as caught:
        model(x)
    assert "'0.weight'" in str(caught.value)
    assert "'weights'" in str(caught.value)
    assert "wake_up" in str(caught.value)
    assert model[0].calls == 1
    cumem.wake_up()
    assert torch.equal(model(x), expected)


@torch.no_grad()
def test_a_guard_looks_at_parameters_and_buffers_of_every_submodule() -> None:
    model, _, x = guarded_model()
    cumem.sleep(tags=["adapter"])
    with pytest.raises(cumem.AsleepError, match=r"'1\.scale'.*'adapter'"):
        model(x)
    cumem.wake_up()
    model(x)


@torch.no_grad()
def test_a_guard_lets_calls_through_when_another_tag_sleeps_or_it_was_removed() -> None:
    model, guard, x = guarded_model()
    with cumem.use_memory_pool("kv_cache"):
        kv = make(100)
    cumem.sleep(tags=["kv_cache"])
    assert model(x).shape == (2, 8)
    guard.remove()
    cumem.wake_up()
    cumem.sleep(tags=["adapter"])
    assert model[0](x).shape == (2, 8)
    assert not model._forward_pre_hooks
    cumem.wake_up()
    del kv


@torch.no_grad()
def test_a_guard_works_on_every_thread() -> None:
    model, _, x = guarded_model()
    cumem.sleep()
    with pytest.raises(cumem.AsleepError):
        in_thread(lambda: model(x))
    cumem.wake_up()
    in_thread(lambda: model(x))
