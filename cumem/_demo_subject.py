"""What does the demo need of a model?"""

from __future__ import annotations

from typing import Protocol

import torch

from cumem.loading import Loaded


class DemoError(Exception):
    """The demo cannot be run like this; the message says why and what to do."""


class Subject(Protocol):
    """A model that the demo can run."""

    title: str
    weight_bytes: int

    def build(self, device: torch.device) -> torch.nn.Module:
        """The model, with memory of its own on ``device`` and no contents."""
        ...

    def load(self, model: torch.nn.Module) -> Loaded:
        """Fills it in place from a checkpoint."""
        ...

    def make_cache(self, device: torch.device, most_bytes: int) -> list[torch.Tensor]:
        """A KV cache of about ``most_bytes``, undefined."""
        ...

    def run(self, model: torch.nn.Module, cache: list[torch.Tensor]) -> torch.Tensor:
        """The same work each time; it relies on no earlier contents of the cache."""
        ...

    def describe(self, output: torch.Tensor) -> str: ...
