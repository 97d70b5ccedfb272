"""Which device does an argument name?"""

from __future__ import annotations

from typing import TypeAlias

import torch

from cumem._runtime import Runtime

DeviceLike: TypeAlias = "torch.device | str | int | None"


def device_index(device: DeviceLike, runtime: Runtime) -> int:
    """The ordinal that ``device`` names.

    Raises:
        ValueError: no such device, or one of another kind. TypeError: a wrong type.
    """
    backend = runtime.backend
    if device is None:
        return backend.current_device()
    if isinstance(device, bool) or not isinstance(device, (int, str, torch.device)):
        raise TypeError(f"device must be a torch.device, str or int, not {type(device).__name__}")
    kind, index = _parse(device, backend.device_type)
    count = backend.device_count()
    if kind != backend.device_type or not 0 <= (index or 0) < count:
        names = ", ".join(runtime.device_name(ordinal) for ordinal in range(count))
        raise ValueError(f"no device {str(device)!r} for cumem; choices: {names}")
    return backend.current_device() if index is None else index


def _parse(device: torch.device | str | int, kind: str) -> tuple[str, int | None]:
    if isinstance(device, int):
        return kind, device
    try:
        named = torch.device(device)
    except RuntimeError:  # torch's text for a string that names no device
        return str(device), None
    return named.type, named.index
