"""Does a compiled model run on with weights that have slept?

What torch's own code generator makes of it is tried on a GPU (tests/gpu/groups/compiled.py).
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import nn

import cumem

WIDTH = 64

# Torch's compiler uses what torch itself has deprecated.
pytestmark = pytest.mark.filterwarnings("ignore:.*torch.jit.script_method:DeprecationWarning")


@pytest.fixture(autouse=True)
def forget_what_was_compiled() -> Iterator[None]:
    yield
    torch._dynamo.reset()


def model_in_the_pool() -> nn.Module:
    with cumem.use_memory_pool("weights"), cumem.default_device():
        layers = [nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH)]
        model = nn.Sequential(*layers).eval()
    assert cumem.covered(model, "weights") == []
    return model


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_a_compiled_model_gives_the_same_bits_after_its_weights_slept(backend: str) -> None:
    model = model_in_the_pool()
    compiled = torch.compile(model, backend=backend, fullgraph=True)
    x = torch.randn(8, WIDTH, device=cumem.default_device())
    where = [weight.data_ptr() for weight in model.parameters()]
    with torch.inference_mode():
        right = compiled(x).clone()
        for _ in range(2):
            cumem.sleep()
            cumem.wake_up()
            assert torch.equal(compiled(x), right)
        with torch._dynamo.config.patch(error_on_recompile=True):
            assert torch.equal(compiled(x), right)
    assert where == [weight.data_ptr() for weight in model.parameters()]


def test_new_weights_are_seen_after_a_wake() -> None:
    model = model_in_the_pool()
    compiled = torch.compile(model, backend="aot_eager")
    x = torch.randn(8, WIDTH, device=cumem.default_device())
    with torch.inference_mode():
        before = compiled(x).clone()
        cumem.sleep(level=2)
        cumem.wake_up(fill="zero")
        assert not compiled(x).any()
        for weight in model.parameters():
            weight.fill_(0.5)
        assert torch.equal(compiled(x), model(x))
        assert not torch.equal(compiled(x), before)


def test_a_guarded_model_that_sleeps_is_an_error_also_when_compiled() -> None:
    model = model_in_the_pool()
    cumem.guard(model)
    compiled = torch.compile(model, backend="eager")
    x = torch.randn(8, WIDTH, device=cumem.default_device())
    with torch.inference_mode():
        right = compiled(x).clone()
        cumem.sleep()
        with pytest.raises(cumem.AsleepError, match="weights"):
            compiled(x)
        cumem.wake_up()
        assert torch.equal(compiled(x), right)
