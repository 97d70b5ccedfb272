"""What does the backup of a sleeping tensor hold?"""

from __future__ import annotations

import torch

from cumem import _C, _operation, _runtime, inspection, waking
from cumem.errors import CumemError, translated

_LEFT = "Nothing was changed."


def backup_of(tensor: torch.Tensor) -> torch.Tensor | None:
    """A copy on the host of what a sleeping tensor holds; it stays asleep.

    Args:
        tensor: contiguous, in a pool, of any shape and type.

    Returns:
        A tensor of the same shape and type on the cpu, a copy of its own; None while
        ``tensor`` is awake.

    Raises:
        TypeError: not a tensor. ValueError: not contiguous, or not in a pool.
        CumemError: its contents were discarded, or come back from a file.
    """
    if inspection.tag_of(tensor) is None:
        raise ValueError("the tensor is not in a pool, so it has no backup")
    if not tensor.is_contiguous():
        raise ValueError(f"a backup is read whole: shape {tuple(tensor.shape)} is not contiguous")
    runtime = _runtime.current()
    waking.join_pending()
    with _operation.exclusive("backup_of()", ()):
        if inspection.is_mapped(tensor):
            return None
        copy = bytearray(tensor.nbytes)  # the host's own, also inside a scope of the emulator
        into = torch.frombuffer(copy, dtype=torch.uint8)
        try:
            with translated("backup_of()", _LEFT, runtime.backend.device_type):
                runtime.allocator.read_backup(tensor.data_ptr(), len(copy), into.data_ptr())
        except CumemError as error:
            cause = error.__cause__
            if isinstance(cause, _C.StatusError) and cause.fault == "invalid":
                tag = inspection.tag_of(tensor)
                raise CumemError(
                    f"the tensor sleeps without a backup in host memory: contents of tag {tag!r} "
                    "were discarded, or come back from a file"
                ) from error
            raise
    return into.view(tensor.dtype).view(tensor.shape)
