"""What stops a call of a module whose memory is away?"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support import (
    in_thread,
    make,
)

import cumem


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
