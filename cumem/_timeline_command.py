"""What does ``python -m cumem timeline`` record?

A model is built on the device in a pool, filled in place, put to sleep and woken: the
way that a serving engine takes.
"""

from __future__ import annotations

from pathlib import Path

import torch

import cumem
from cumem import _runtime, demo
from cumem.errors import translated
from cumem.timeline import Timeline, plotting


def check_outputs(json_file: str | None, plot_file: str | None) -> None:
    """Can what was asked for be written? Said before a model is built, which takes long.

    Raises:
        FileNotFoundError: no folder for a file. CumemError: matplotlib is not installed.
    """
    for file in (json_file, plot_file):
        if file is not None and not Path(file).parent.is_dir():
            raise FileNotFoundError(f"there is no folder for {file!r}; nothing was run")
    if plot_file is not None:
        plotting()


def record(model: str | None, size_bytes: int | None) -> Timeline:
    """A timeline of the model's way on the current device.

    Args:
        model: a Hugging Face model folder, ``minilm``, or None for a model of our own.
        size_bytes: weights of our own model; None: what suits the device.

    Raises:
        DemoError: the model cannot be used. CumemError, torch.OutOfMemoryError: what
            the calls raise that it makes.
    """
    runtime = _runtime.current()
    device = runtime.backend.current_device()
    with translated("timeline", "Nothing was changed."):
        info = runtime.allocator.device_info(device)
    subject = demo.choose_subject(model, size_bytes, info, emulated=runtime.emulated)
    with Timeline() as timeline:
        with cumem.use_memory_pool(demo.WEIGHTS):
            timeline.mark("before constructor")
            module = subject.build(cumem.default_device())
            timeline.mark("after constructor")
        subject.load(module)
        timeline.mark("after checkpoint copy")
        _finish(module)
        timeline.mark("after post-load")
        cumem.sleep()
        cumem.wake_up()
    return timeline


def _finish(module: torch.nn.Module) -> None:
    """What loaders do when all weights are there."""
    tie = getattr(module, "tie_weights", None)
    if callable(tie):
        tie()
    module.requires_grad_(requires_grad=False).eval()
