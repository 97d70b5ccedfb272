"""How does the memory of a module stay where it is while it is being read or written?"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager

import torch

from cumem import _owned, _runtime, inspection
from cumem._text import some
from cumem.errors import AsleepError, BusyError


@contextmanager
def held(tensors: Mapping[str, Sequence[torch.Tensor]], operation: str) -> Iterator[None]:
    """Within the block these are awake, nobody puts their tags to sleep, and no work is pending.

    Args:
        tensors: by the name that a message is to give them.
        operation: the call, for messages.

    Raises:
        AsleepError: some are asleep; the message names them all. BusyError: a capture is
            under way, or this is a hook of a sleep or wake of their tag.
    """
    runtime = _runtime.if_started()
    if runtime is not None and runtime.backend.is_capturing():
        raise BusyError(f"{operation}: a CUDA graph capture is under way. Nothing was changed.")
    views = [view for parts in tensors.values() for view in parts]
    places = {(inspection.tag_of(view), view.device.index) for view in views}
    with ExitStack() as stack:
        for tag, device in places:
            if tag is not None:
                stack.enter_context(_owned.writing(tag, device))
        refuse_asleep(tensors, operation)
        wait_for_devices(views)
        yield


def refuse_asleep(tensors: Mapping[str, Sequence[torch.Tensor]], operation: str) -> None:
    """Raises AsleepError that names all of what sleeps."""
    asleep = [
        name
        for name, views in tensors.items()
        if not all(inspection.is_mapped(view) for view in views)
    ]
    if asleep:
        raise AsleepError(
            f"{operation}: {len(asleep)} tensor(s) are asleep: {some(asleep)}. Nothing was "
            "changed; wake them first."
        )


def wait_for_devices(views: Sequence[torch.Tensor]) -> None:
    """Waits for all work on every GPU that one of these is on."""
    for device in {view.device for view in views if view.device.type == "cuda"}:
        torch.cuda.synchronize(device)
