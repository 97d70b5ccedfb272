"""What do tests of memory of cumem's own work with? One tensor in a segment of its own."""

from __future__ import annotations

import torch
from support import fill_pattern

from cumem import _owned


def owned(count: int, seed: int = 0, **settings: object) -> torch.Tensor:
    """One tensor of ``count`` bytes with its pattern, in a segment of its own."""
    segment = _owned.allocate(count, **{"tag": "weights", **settings})  # type: ignore[arg-type]
    tensor = segment.tensor(torch.uint8, (count,))
    fill_pattern(tensor, seed)
    return tensor
