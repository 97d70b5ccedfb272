"""Which driver, which allocator and which torch are behind the calls of this process?

Decided at first use and once: there is no silent fallback from a GPU to the
emulator. Tests put an emulated machine in its place for a while
(:func:`cumem.testing.emulated_driver`).
"""

from __future__ import annotations

import threading
import warnings
from dataclasses import dataclass, field
from pathlib import Path

import torch

from cumem import _C, options
from cumem._backend import Backend
from cumem.errors import DriverError, forked, translated

_CUDA_LIBRARY = "libcuda.so.1"


@dataclass
class Runtime:
    """What is behind every call: one driver, its allocator, torch's side of it."""

    driver: _C.Driver
    allocator: _C.Allocator
    backend: Backend
    emulated: bool
    watched: set[int] = field(default_factory=set)  # devices whose torch streams are known
    digest_tried: set[int] = field(default_factory=set)  # devices asked to digest
    told: int = 0  # faults of free() that were warned about

    def device_name(self, device: int) -> str:
        return f"{self.backend.device_type}:{device}"


_lock = threading.RLock()
_current: Runtime | None = None
_options = options.Options()


def current() -> Runtime:
    """The runtime of this process, made now if there is none.

    Raises:
        DriverError: no driver, or one that cannot do it; the message says what to do.
    """
    global _current
    ready("cumem")
    with _lock:
        if _current is None:
            _current = _start()
        runtime = _current
    _warn_of_faults(runtime)
    return runtime


def if_started() -> Runtime | None:
    return _current


def ready(operation: str) -> Runtime | None:
    """As :func:`if_started`, for what works with the driver or waits for other threads.

    Raises:
        DriverError: this process is a fork of the one that started the runtime. The
            driver does not work here, and threads that held a lock are not there.
    """
    if _current is not None and _C.forked():
        raise forked(operation)
    return _current


def replace(runtime: Runtime | None) -> Runtime | None:
    """Puts another runtime in place; returns the one that was."""
    global _current
    with _lock:
        previous, _current = _current, runtime
        _C.install(runtime.allocator if runtime is not None else None)
    return previous


def configure(new: options.Options) -> None:
    """Sets the options of this process; they hold for what is allocated from now on.

    Raises:
        TypeError: not an :class:`Options`.
    """
    global _options
    if not isinstance(new, options.Options):
        raise TypeError(f"configure takes an Options, not {type(new).__name__}")
    with _lock:
        _options = new
        if _current is not None:
            _current.allocator.configure(core_config(new))


def current_options() -> options.Options:
    return _options


def core_config(chosen: options.Options) -> _C.Config:
    return _C.Config(
        chunk_bytes=chosen.chunk_bytes,
        margin_bytes=chosen.memory_margin_bytes,
        host_limit_bytes=chosen.host_limit_bytes or 0,
        pin_backups=chosen.pin_backups,
        allow_pageable=chosen.allow_pageable,
        retain_backup=chosen.retain_backup,
        threads=chosen.host_threads,
        file=_C.FileConfig(
            threads=chosen.load_threads,
            buffer_bytes=chosen.load_buffer_bytes,
            ring_bytes=chosen.load_ring_bytes,
            folder=chosen.disk_dir or "",
        ),
    )


def emulator_library() -> str:
    """Path of the emulated driver that ships with the package."""
    found = sorted(Path(__file__).parent.glob("_emulator*.so"))
    if not found:
        raise DriverError("the emulated driver is missing from the installed package: reinstall it")
    return str(found[0])


def _start() -> Runtime:
    if options.driver_choice() == "emulated":
        from cumem.testing import process_machine

        runtime = process_machine()
    else:
        runtime = _start_cuda()
    _C.install(runtime.allocator)
    return runtime


def _start_cuda() -> Runtime:
    from cumem._torch import CudaBackend

    driver = _load_cuda_driver()
    if not torch.cuda.is_available():
        raise DriverError(
            f"torch {torch.__version__} sees no CUDA device (a cpu build of torch, or no visible "
            "GPU); install a CUDA build, or set CUMEM_DRIVER=emulated to try cumem without a GPU"
        )
    allocator = _C.Allocator(driver, core_config(_options))
    return Runtime(driver, allocator, CudaBackend(), emulated=False)


def _load_cuda_driver() -> _C.Driver:
    try:
        return _C.load_driver(_CUDA_LIBRARY)
    except _C.StatusError as error:
        reason = error.code_name or str(error)
        raise DriverError(
            f"cannot use the CUDA driver ({error.call}: {reason}); install an NVIDIA driver for "
            "CUDA 12 or newer, or set CUMEM_DRIVER=emulated to try cumem without a GPU"
        ) from error


def watch_streams(runtime: Runtime, device: int) -> None:
    """Tells the core once which streams to ask before it waits for ``device``."""
    with _lock:
        if device in runtime.watched:
            return
        kind = runtime.backend.device_type
        with translated(f"device {kind}:{device}", "Nothing was changed.", kind):
            runtime.allocator.watch(device, runtime.backend.streams(device))
        runtime.watched.add(device)


def _warn_of_faults(runtime: Runtime) -> None:
    """Says once what free() and destructors could not: they have nobody to tell."""
    counters = runtime.allocator.counters()
    faults = counters.unknown + counters.refused
    if faults <= runtime.told:
        return
    runtime.told = faults
    warnings.warn(
        f"cumem: {counters.refused} segment(s) could not be given back to the driver; "
        f"{counters.quarantined} ({counters.quarantined_bytes} bytes) are kept aside until trim(), "
        f"a sleep or a wake finds that it takes them; {counters.unknown} free(s) of unknown "
        "addresses were ignored. See cumem.stats().",
        RuntimeWarning,
        stacklevel=3,
    )
