"""How is host memory for backups made before it is needed?

New host memory is slow: its pages must be made and pinned. Done while a model
loads, it costs the first sleep nothing.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable

from cumem import _C, _runtime, _transition
from cumem._arguments import sleep_request
from cumem._plan import decide
from cumem._runtime import Runtime
from cumem.errors import CumemError, from_status


class Preparation:
    """Host memory that is being made.

    Attributes:
        bytes: how much was asked for.
    """

    def __init__(self, runtime: Runtime, count: int, there: int, device: int) -> None:
        self.bytes = count
        self._missing = max(0, count - there)
        self._runtime = runtime
        self._device = device
        self._error: CumemError | None = None
        # Not a daemon: the process must not end while the driver pins memory for it.
        self._thread = threading.Thread(target=self._run, name="cumem-prepare")

    def start(self) -> Preparation:
        self._thread.start()
        return self

    def done(self) -> bool:
        """Is it over, well or not?"""
        return not self._thread.is_alive()

    def wait(self) -> None:
        """Returns when the memory is there.

        Raises:
            HostOutOfMemoryError: the host, or the limit, has no room; a sleep can
                still be tried. DriverError: the driver refused.
        """
        self._thread.join()
        error, self._error = self._error, None
        if error is not None:
            raise error

    def _run(self) -> None:
        left = "No memory was made; a sleep takes what it needs itself."
        try:
            self._runtime.allocator.prepare_host(self._missing, self._device)
        except _C.StatusError as error:
            kind = self._runtime.backend.device_type
            self._error = from_status(error, "prepare()", left, kind)


def prepare(
    tags: Iterable[str] | None = None, *, bytes: int | None = None, background: bool = True
) -> Preparation:
    """Makes host memory for the next sleep: its pages are there, pinned and near the GPU.

    A sleep that comes earlier goes on with what is there. Call it again when more
    was allocated. What sleeps to disk or is left to its file needs none. With
    ``Options(pin_backups=False)`` nothing is pinned.

    Args:
        tags: for what a sleep of these tags would back up to host memory now; None: all.
        bytes: for so many bytes instead, when the model is not there yet.
        background: return at once; False: wait.

    Raises:
        ValueError: an unknown tag, or bytes below zero. TypeError: a wrong type.
        HostOutOfMemoryError, DriverError: see :meth:`Preparation.wait`; only with
            ``background=False``.
    """
    request = sleep_request(1, tags, None)
    if bytes is not None and (isinstance(bytes, bool) or not isinstance(bytes, int)):
        raise TypeError(f"bytes must be an int, not {type(bytes).__name__}")
    if bytes is not None and bytes < 0:
        raise ValueError(f"bytes must not be negative, not {bytes}")
    runtime = _runtime.current()
    decisions = decide(runtime, request) if bytes is None else []
    wanted, kept = _transition.host_backups(decisions) if bytes is None else (bytes, 0)
    device = decisions[0].info.device if decisions else runtime.backend.current_device()
    preparation = Preparation(runtime, wanted, kept, device).start()
    if not background:
        preparation.wait()
    return preparation
