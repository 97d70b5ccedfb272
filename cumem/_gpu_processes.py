"""Who else uses a GPU, as the driver's management library says?

That is all one process can know of another: a number of bytes. In most containers
not even that is told.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from cumem.errors import DriverError

_MISSING = (
    "the management library of the NVIDIA driver cannot be used ({}); pip install nvidia-ml-py"
)


@dataclass(frozen=True)
class GpuProcess:
    """A process that uses a device.

    Attributes:
        pid: its number, as this machine's first namespace counts.
        bytes: device memory it uses; None where the driver does not tell.
    """

    pid: int
    bytes: int | None


def on_device(uuid: str | None) -> tuple[GpuProcess, ...]:
    """The processes on a device; none where they cannot be known."""
    if uuid is None:
        return ()
    try:
        with _library() as nvml:
            return _processes(nvml, nvml.nvmlDeviceGetHandleByUUID(uuid))
    except DriverError:
        return ()


def memory_of(pid: int) -> dict[str, int | None]:
    """Device memory of one process, by device; None where the driver does not tell.

    Raises:
        DriverError: the management library cannot be used.
    """
    with _library() as nvml:
        found: dict[str, int | None] = {}
        for index in range(nvml.nvmlDeviceGetCount()):
            for process in _processes(nvml, nvml.nvmlDeviceGetHandleByIndex(index)):
                if process.pid == pid:
                    found[f"gpu {index}"] = process.bytes
        return found


def _processes(nvml: Any, handle: Any) -> tuple[GpuProcess, ...]:
    running = nvml.nvmlDeviceGetComputeRunningProcesses(handle)
    processes = [GpuProcess(entry.pid, entry.usedGpuMemory) for entry in running]
    return tuple(sorted(processes, key=lambda process: process.pid))


@contextmanager
def _library() -> Iterator[Any]:
    """The library, started for the block.

    Raises:
        DriverError: it is not installed, or refuses.
    """
    try:
        nvml = importlib.import_module("pynvml")
    except ImportError as error:
        raise DriverError(_MISSING.format(error)) from error
    try:
        nvml.nvmlInit()
        try:
            yield nvml
        finally:
            nvml.nvmlShutdown()
    except nvml.NVMLError as error:
        raise DriverError(_MISSING.format(error)) from error
