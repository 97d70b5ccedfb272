"""Which errors can cumem raise, and what does each leave behind?

Every message says what failed, how much, where, what is left, and what to do.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from cumem import _C
from cumem._text import size


class CumemError(RuntimeError):
    """Base of every error that is not a plain ``ValueError`` or ``TypeError``."""


class DeviceOutOfMemoryError(CumemError, torch.OutOfMemoryError):
    """The device has no room. Nothing was changed; the call can be repeated."""


class HostOutOfMemoryError(CumemError, MemoryError):
    """The host has no room for backups. Nothing was changed; the call can be repeated."""


class AsleepError(CumemError):
    """Memory was used that is asleep. Nothing was changed."""


class BusyError(CumemError):
    """A scope or a graph capture is open where it must not be. Nothing was changed."""


class DriverError(CumemError):
    """The driver refused a call, or cannot be used at all.

    What is left is in the message: most failures leave everything as it was; a
    refused unmap leaves every segment exactly awake or asleep, and the same call
    continues.
    """


class IntegrityError(CumemError):
    """Bytes are not what they were. Nothing was unmapped or woken; backups are kept."""


class CheckpointError(CumemError, ValueError):
    """A file is not what it should be. Nothing was loaded, unmapped or woken."""


class StorageError(CumemError, OSError):
    """The folder for backups refused: it is full, or cannot be read. Nothing was lost."""


_DEAD = (
    "an earlier error (an illegal address or the like) has ended this CUDA context; "
    "no call can succeed any more: restart the process"
)
_DAMAGED = (
    "Nothing was unmapped or woken. A sleep that is repeated copies everything anew; a wake "
    "without verify takes the backup as it is."
)
_CHANGED = (
    "Nothing more was unmapped or woken. Put the file back as it was loaded (size, time of "
    "change and bytes) and repeat the call; what is awake can move to other memory with adopt()."
)
_FORKED = (
    "this process is a fork of one that already used cumem; a CUDA context does not "
    "survive a fork: use the spawn start method, or fork before first use"
)


def forked(operation: str) -> DriverError:
    """The error of a call in a child of the process that set cumem up."""
    return DriverError(f"{operation}: {_FORKED}")


def from_status(error: _C.StatusError, operation: str, left: str, kind: str = "cuda") -> CumemError:
    """The public error for what the core reports.

    Args:
        error: what the core raised.
        operation: the call the user made, as text: ``wake_up("kv_cache")``.
        left: what is left and what to do, as whole sentences.
        kind: what torch calls the devices.
    """
    where = f" on {kind}:{error.device}" if error.device >= 0 else ""
    if error.fault == "dead_context":
        return DriverError(f"{operation}: {error.call} failed ({error.code_name}): {_DEAD}")
    if error.fault == "forked":
        return forked(operation)
    if error.fault == "capture":
        return BusyError(f"{operation}: a CUDA graph capture is under way{where}. {left}")
    if error.fault == "device_memory":
        return DeviceOutOfMemoryError(f"{operation}: {_memory(error, where)}. {left}")
    if error.fault == "host_memory":
        needed = f"no room for {size(error.bytes)} of host memory ({error.call}{_why(error)})"
        return HostOutOfMemoryError(f"{operation}: {needed}; {size(error.free_bytes)} free. {left}")
    if error.fault in ("source", "disk"):
        return _file_error(error, operation, left)
    if error.fault == "integrity":
        at = f"{error.call} at {error.address:#x}{where}"
        return IntegrityError(f"{operation}: {at} is not what was put to sleep. {_DAMAGED}")
    return DriverError(f"{operation}: {_what(error, where)} failed{_why(error)}. {left}")


def _file_error(error: _C.StatusError, operation: str, left: str) -> CumemError:
    """For a file that cannot be read or written, or is not what it was."""
    reason = f"{error.call} failed ({os.strerror(error.error)})" if error.error else error.call
    amount = f", {size(error.bytes)} were wanted" if error.bytes and error.error else ""
    # There is nothing to put back, or nothing that was there before.
    loading = operation.startswith(("load_file(", "load_into", "restore_snapshot"))
    changed = error.fault == "source" and not error.error and not loading
    text = f"{operation}: {error.path}: {reason}{amount}. {_CHANGED if changed else left}"
    if error.fault == "source":
        return CheckpointError(text)
    failure = StorageError(text)
    failure.errno = error.error
    return failure


def _what(error: _C.StatusError, where: str) -> str:
    amount = f" of {size(error.bytes)}" if error.bytes else ""
    return f"{error.call}{amount}{where}"


def _why(error: _C.StatusError) -> str:
    reason = error.code_name or (str(error) if str(error) != error.call else "")
    return f" ({reason})" if reason else ""


def _memory(error: _C.StatusError, where: str) -> str:
    return f"{_what(error, where)} failed{_why(error)}; {size(error.free_bytes)} free"


@contextmanager
def translated(operation: str, left: str, kind: str = "cuda") -> Iterator[None]:
    """Turns what the core raises inside the block into the public error."""
    try:
        yield
    except _C.StatusError as error:
        raise from_status(error, operation, left, kind) from error
