"""Does a module compute the same bits while its weights are still on their way?"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from support import MIB, DriverUnderTest, holds_pattern, make

import cumem
from cumem.testing import EmulatedDriver


class Scaled(torch.nn.Module):
    """A layer with a parameter and a buffer of its own."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(width, width)
        self.scale = torch.nn.Parameter(torch.rand(width))
        self.register_buffer("shift", torch.rand(width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.linear(x) * self.scale + self.shift)


def build(layers: int = 4, width: int = 1800) -> torch.nn.Sequential:
    torch.manual_seed(1)
    with cumem.use_memory_pool("weights"), torch.device(cumem.default_device()):
        return torch.nn.Sequential(*(Scaled(width) for _ in range(layers))).eval()


def inputs(width: int = 1800) -> torch.Tensor:
    return torch.linspace(-1, 1, 3 * width, device=cumem.default_device()).view(3, width)


def hooks_on(module: torch.nn.Module) -> int:
    return sum(len(part._forward_pre_hooks) for part in module.modules())


@pytest.fixture(autouse=True)
def no_grad() -> Iterator[None]:
    with torch.no_grad():
        yield


def test_outputs_are_the_same_bits_and_the_hooks_go() -> None:
    model, x = build(), inputs()
    before = model(x)
    for _ in range(2):
        cumem.sleep()
        handle = cumem.stream_wake(model)
        assert hooks_on(model) == 8
        assert torch.equal(model(x), before)
        assert hooks_on(model) == 0
        assert handle.wait().tags == {"weights"}
        assert torch.equal(model(x), before)


@pytest.mark.parametrize("end", ["wait", "sleep", "wake_up"])
def test_no_hook_is_left_on_a_submodule_that_nobody_calls(end: str) -> None:
    model, x = build(), inputs()
    before = model[0](x)
    cumem.sleep()
    handle = cumem.stream_wake(model)
    assert torch.equal(model[0](x), before)
    assert hooks_on(model) == 6
    ends = {"wait": handle.wait, "sleep": cumem.sleep, "wake_up": cumem.wake_up}
    ends[end]()
    assert hooks_on(model) == 0
    cumem.wake_up()
    assert torch.equal(model[0](x), before)


def test_hooks_of_others_stay() -> None:
    model, x = build(layers=1), inputs()
    calls: list[object] = []
    cumem.sleep()
    model[0].register_forward_pre_hook(lambda *_: calls.append("before"))
    handle = cumem.stream_wake(model)
    model[0].register_forward_pre_hook(lambda *_: calls.append("after"))
    handle.wait()
    model(x)
    assert calls == ["before", "after"]


def test_it_wakes_what_the_module_does_not_use_as_well() -> None:
    model, x = build(), inputs()
    with cumem.use_memory_pool("other"):
        other = make(12 * MIB, 3)
    before = model(x)
    cumem.sleep()
    handle = cumem.stream_wake(model, tags=["weights"])
    assert torch.equal(model(x), before)
    handle.wait()
    assert cumem.sleeping_tags() == {"other"}
    cumem.sleep()
    cumem.stream_wake(model).wait()
    assert not cumem.is_sleeping()
    assert holds_pattern(other, 3)


@pytest.mark.needs("a bandwidth that can be set")
def test_a_layer_runs_before_the_last_one_is_there(emulator: EmulatedDriver) -> None:
    model, x = build(), inputs()
    before = model(x)
    cumem.sleep()
    emulator.set_bandwidth(48 * MIB)
    done: list[bool] = []
    handle = cumem.stream_wake(model)
    registered = model[0].register_forward_hook(lambda *_: done.append(handle.done()))
    assert torch.equal(model(x), before)
    registered.remove()
    assert done == [False]
    handle.wait()


def test_a_failed_wake_is_told_by_the_layer_and_can_be_made_good(driver: DriverUnderTest) -> None:
    model, x = build(), inputs()
    before = model(x)
    cumem.sleep()
    with driver.another_tenant(leaves=26 * MIB):
        handle = cumem.stream_wake(model)
        with pytest.raises(cumem.DeviceOutOfMemoryError):
            model(x)
        with pytest.raises(cumem.DeviceOutOfMemoryError):
            handle.wait()
    cumem.wake_up()
    assert torch.equal(model(x), before)
    assert hooks_on(model) == 0


def test_hooks_keep_calls_off_what_a_failed_wake_has_left_asleep(driver: DriverUnderTest) -> None:
    model, x = build(), inputs()
    before = model(x)
    cumem.sleep()
    with driver.another_tenant(leaves=26 * MIB):
        with pytest.raises(cumem.DeviceOutOfMemoryError):
            cumem.stream_wake(model).wait()
        assert 0 < hooks_on(model) < 8  # what came needs none
        for _ in range(2):
            with pytest.raises(cumem.DeviceOutOfMemoryError):
                model(x)
            with pytest.raises(cumem.DeviceOutOfMemoryError):
                cumem.wake_up()
    cumem.wake_up()
    cumem.sleep(tags=[])
    assert hooks_on(model) == 0
    assert torch.equal(model(x), before)


def test_a_module_that_is_awake_needs_no_waiting() -> None:
    model, x = build(), inputs()
    before = model(x)
    assert cumem.stream_wake(model).wait().tags == frozenset()
    assert torch.equal(model(x), before)
    assert hooks_on(model) == 0


def test_a_sleep_between_the_wake_and_the_call_is_made_good_by_another_wake() -> None:
    model, x = build(), inputs()
    before = model(x)
    cumem.sleep()
    cumem.stream_wake(model)
    cumem.sleep()
    cumem.stream_wake(model)
    assert torch.equal(model(x), before)
    assert hooks_on(model) == 0


# Their forward reads weights of what is inside them, without calling it.
LAYERS = {
    "attention": lambda: torch.nn.MultiheadAttention(64, 4, batch_first=True),
    "transformer layer": lambda: torch.nn.TransformerEncoderLayer(64, 4, 4000, batch_first=True),
}


@pytest.mark.needs("a bandwidth that can be set")
@pytest.mark.parametrize("kind", LAYERS)
def test_layers_that_read_inside_others_wait_for_all_of_it(
    emulator: EmulatedDriver, kind: str
) -> None:
    torch.manual_seed(2)
    with cumem.use_memory_pool("weights"):
        layer = LAYERS[kind]().eval()
        filler = [make(12 * MIB, seed) for seed in range(2)]
    x = torch.linspace(-1, 1, 2 * 5 * 64).view(2, 5, 64)
    arguments = (x, x, x) if kind == "attention" else (x,)
    before = layer(*arguments)
    cumem.sleep()
    emulator.set_bandwidth(30 * MIB)
    handle = cumem.stream_wake(layer)
    after = layer(*arguments)
    handle.wait()
    pairs = zip(before, after, strict=True)
    assert all(torch.equal(one, other) for one, other in pairs if one is not None)
    del filler


@pytest.mark.parametrize(
    ("call", "error"),
    [
        (lambda model: cumem.stream_wake(model.parameters()), TypeError),
        (lambda model: cumem.stream_wake(model, tags="weights"), TypeError),
        (lambda model: cumem.stream_wake(model, tags=["unknown"]), ValueError),
        (lambda model: cumem.stream_wake(model, fill="ones"), ValueError),
    ],
)
def test_a_wrong_argument_changes_nothing(call: object, error: type[Exception]) -> None:
    model = build(layers=1)
    cumem.sleep()
    with pytest.raises(error):
        call(model)
    assert cumem.sleeping_tags() == {"weights"}
    assert hooks_on(model) == 0
    cumem.wake_up()
