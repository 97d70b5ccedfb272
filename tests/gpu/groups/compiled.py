"""Does a compiled model run on with weights that have slept?"""

from __future__ import annotations

import importlib.util
import os
import shutil

# In this process only, so that no helper process of the compiler outlives a check.
os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")

import torch
from harness import need, run
from support import CUDA, DEVICE, addresses

import cumem

WIDTH = 512


def model_in_the_pool() -> torch.nn.Module:
    need(CUDA, "CUDA device")
    need(importlib.util.find_spec("triton"), "Triton")
    need(shutil.which("cc") or shutil.which("gcc") or shutil.which("clang"), "C compiler")
    layers = [torch.nn.Linear(WIDTH, 4 * WIDTH), torch.nn.GELU(), torch.nn.Linear(4 * WIDTH, WIDTH)]
    with cumem.use_memory_pool("weights"):
        model = torch.nn.Sequential(*layers).to(DEVICE, torch.bfloat16)
    assert cumem.covered(model, "weights") == []
    return model.eval()


def same_after_wake(model: torch.nn.Module, mode: str | None) -> None:
    compiled = torch.compile(model, mode=mode)
    x = torch.randn(32, WIDTH, device=DEVICE, dtype=torch.bfloat16)
    where = addresses(list(model.parameters()))
    with torch.inference_mode():
        for _ in range(3):  # graphs are captured after the first runs
            right = compiled(x).clone()
        for _ in range(3):
            cumem.sleep()
            assert not any(cumem.is_mapped(weight) for weight in model.parameters())
            cumem.wake_up()
            assert torch.equal(compiled(x), right)
    assert addresses(list(model.parameters())) == where


def compiled_by_default() -> None:
    same_after_wake(model_in_the_pool(), None)


def compiled_to_graphs() -> None:
    same_after_wake(model_in_the_pool(), "reduce-overhead")


def new_weights_are_seen_after_wake() -> None:
    model = model_in_the_pool()
    compiled = torch.compile(model)
    x = torch.randn(32, WIDTH, device=DEVICE, dtype=torch.bfloat16)
    with torch.inference_mode():
        before = compiled(x).clone()
        cumem.sleep(level=2)
        cumem.wake_up()
        for weight in model.parameters():
            weight.copy_(torch.randn_like(weight) * 0.02)
        right = compiled(x).clone()
        assert not torch.equal(right, before)
        torch.testing.assert_close(right, model(x), rtol=0.05, atol=0.05)


if __name__ == "__main__":
    run([compiled_by_default, compiled_to_graphs, new_weights_are_seen_after_wake])
