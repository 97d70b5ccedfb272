"""How can work start before everything is awake?

A wake with ``wait=False`` goes on in a thread of its own. Segments come in a given
order, each is usable as soon as its own bytes are there, and streams can be made to
wait for the bytes they need.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable, Sequence
from contextlib import ExitStack

import torch

from cumem import _C, _operation, _runtime, _transition
from cumem._arguments import described, fill_value, known_tags
from cumem._first_calls import forget_paid, own_tensors, wait_at_first_call
from cumem._runtime import Runtime
from cumem.errors import translated
from cumem.inspection import is_mapped
from cumem.reports import WakeReport

_LEFT = "What is awake stays so, the rest is asleep with its backup; call wake_up again."


class WakeHandle:
    """A wake under way; ``wake_up(wait=False)`` and :func:`stream_wake` return one.

    Any other sleep or wake joins it first. A failure leaves what was not restored
    asleep with its backup. It is raised once: by :meth:`wait`, or else by the next
    sleep or wake.
    """

    def __init__(self, runtime: Runtime, job: _transition.WakeJob, started: float) -> None:
        self._runtime = runtime
        self._job = job
        self._started = started  # by time.perf_counter()
        self._stack = ExitStack()
        self._progress = _C.WakeProgress()
        for info in job.segments:
            self._progress.expect(info.address, info.bytes)
        self._report = WakeReport()
        self._error: BaseException | None = None
        self._failed = False  # also when the error was raised
        # Not a daemon: the process must not end while the driver copies for it.
        self._thread = threading.Thread(target=self._run, name="cumem-wake")

    def start(self, stack: ExitStack) -> None:
        """Starts, and takes over what keeps other operations out."""
        self._stack = stack.pop_all()
        try:
            self._thread.start()
        except BaseException:  # the system has no thread for us
            self._stack.close()
            raise

    def done(self) -> bool:
        """Is it over, well or not?"""
        return not self._thread.is_alive()

    def wait(self) -> WakeReport:
        """Returns when everything is awake and its contents are valid for every stream.

        Raises:
            DeviceOutOfMemoryError, DriverError, CumemError: as :func:`wake_up`; the
                rest stays asleep with its backup. Raised by the first call only.
        """
        self._thread.join()
        forget_paid()
        error, self._error = self._error, None
        if error is not None:
            raise error
        return self._report

    def wait_for(self, tensor: torch.Tensor) -> None:
        """Makes the current stream of the tensor's device wait for its bytes.

        Blocks this thread only until they are on their way. Memory that this wake
        does not bring needs no waiting.

        Raises:
            DeviceOutOfMemoryError, DriverError: the wake failed before it got there.
        """
        self._hold(tensor.untyped_storage().data_ptr(), tensor.device)

    def wait_for_tag(self, tag: str) -> None:
        """Makes the current stream of each device wait for all bytes of a tag.

        Raises:
            ValueError: an unknown tag. TypeError: not a string.
        """
        known_tags([tag])
        kind = self._runtime.backend.device_type
        for info in self._job.segments:
            if info.tag == tag:
                self._hold(info.address, torch.device(kind, info.device))

    def _owes(self, tensor: torch.Tensor) -> bool:
        """May the tensor's memory be asleep because this wake has not brought it, or not yet?"""
        return not self.done() or (self._failed and not is_mapped(tensor))

    def _hold(self, address: int, device: torch.device) -> None:
        allocator = self._runtime.allocator
        if allocator.is_awake(address, 1):  # also when a later wake has brought it
            return
        with translated("waiting for a wake", _LEFT, self._runtime.backend.device_type):
            if self._runtime.emulated:  # tensors on the cpu have no stream to wait
                self._progress.wait(allocator, address)
            else:
                stream = self._runtime.backend.current_stream(device.index or 0)
                self._progress.hold(allocator, address, stream)

    def _run(self) -> None:
        with self._stack:
            _operation.operate_here()
            try:
                done = _transition.wake(self._runtime, self._job, self._progress)
                self._report = done.report(time.perf_counter() - self._started)
            except BaseException as error:  # noqa: BLE001 - raised by who waits
                self._error, self._failed = error, True
            finally:
                self._progress.give_up()  # does nothing where the core has ended it


_pending: WakeHandle | None = None
_pending_lock = threading.Lock()


def join_pending() -> None:
    """Waits for a wake under way; raises its failure if nobody has seen it.

    Then no module waits for what is there, whether it was called or not.
    """
    global _pending
    with _pending_lock:
        handle = _pending
    if handle is None:
        forget_paid()  # of a wake that failed, what others have brought
        return
    if threading.current_thread() is handle._thread:
        return
    try:
        handle.wait()
    finally:
        with _pending_lock:
            _pending = None if _pending is handle else _pending


def start(
    operation: str, tags: frozenset[str], fill: int | None, order: Sequence[torch.Tensor] = ()
) -> WakeHandle:
    """Starts a wake of these tags, the memory of ``order`` first."""
    global _pending
    runtime = _runtime.current()
    with ExitStack() as stack:
        stack.enter_context(_operation.exclusive(operation, tags))
        join_pending()  # one that another thread began meanwhile is over
        started = time.perf_counter()
        _operation.refuse_capture(operation, runtime)
        job = _transition.plan_wake(runtime, operation, tags, fill, order)
        handle = WakeHandle(runtime, job, started)
        _operation.operate_elsewhere()
        with _pending_lock:
            handle.start(stack)
            _pending = handle
    return handle


def stream_wake(
    module: torch.nn.Module, tags: Iterable[str] | None = None, *, fill: str | None = None
) -> WakeHandle:
    """Starts a wake in the order of the module's layers, and lets it run meanwhile.

    Every submodule waits, on the stream that it runs on, for its own parameters and
    buffers: layer 0 computes while layer 1 is on its way. The hooks that do so remove
    themselves at the first call; those of submodules that nobody calls go with
    :meth:`WakeHandle.wait`, or at the next sleep or wake. After a wake that failed they
    stay as long as the module's memory sleeps. Layers of ``torch.nn`` that read the
    weights of what is inside them (attention, a transformer's layers) wait for all of
    it; a module of yours that does so must call :meth:`WakeHandle.wait_for` itself. A
    guarded module (:func:`cumem.guard`) raises instead of waiting: take its guard away
    first.

    Args:
        module: what will be called next; the order is that of registration.
        tags: the tags to wake, as for :func:`wake_up`.
        fill: as for :func:`wake_up`.

    Raises:
        As :func:`wake_up`, but for failures of the wake itself: see :class:`WakeHandle`.
    """
    if not isinstance(module, torch.nn.Module):
        raise TypeError(f"expected a module, not {type(module).__name__}")
    listed = tags if tags is None or isinstance(tags, str) else list(tags)
    chosen, value = known_tags(listed), fill_value(fill)
    join_pending()
    order = [tensor for part in module.modules() for tensor in own_tensors(part)]
    handle = start(described("stream_wake", listed), chosen, value, order)
    for submodule in module.modules():
        wait_at_first_call(submodule, handle.wait_for, handle._owes)
    return handle
