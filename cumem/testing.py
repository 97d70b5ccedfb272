"""How can cumem be tried and tested without a GPU?

:func:`emulated_driver` puts a fresh emulated machine behind cumem for a while.
It is for tests, CI and trying the API: no number from it is a performance figure.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from cumem import _C, _registry, _runtime, options
from cumem._emulated_backend import EmulatedBackend
from cumem._emulator import Library, error_code, library
from cumem._runtime import Runtime

_GRANULE = 2 << 20
_MOST_BYTES = 1 << 46
_STREAMS = 4  # per device, in the place of those that torch keeps for ever


class EmulatedDriver:
    """Steers one emulated machine; :func:`emulated_driver` yields it.

    A ``stream`` argument is a handle from :meth:`stream` or :meth:`new_stream`;
    None stands for the device 0 stream that plays torch's current one.
    """

    def __init__(self, machine: int) -> None:
        self.machine = machine
        self._library: Library = library()
        self._lock = threading.Lock()
        self._streams: dict[int, list[int]] = {}
        self._capturing: set[int] = set()

    def fail(self, call: str, nth: int = 1, code: str = "CUDA_ERROR_OUT_OF_MEMORY") -> None:
        """Makes the nth call of ``call`` from now on fail with ``code``, once.

        Args:
            call: a driver call by its unversioned name, ``"cuMemCreate"``.
            nth: counts from 1.
            code: the name of a CUresult.

        Raises:
            ValueError: an unknown call or code, or nth below 1.
        """
        value = error_code(code)
        if nth < 1:
            raise ValueError(f"nth counts from 1, not {nth}")
        if self._library.fail(self.machine, call.encode(), nth, value) != 0:
            raise ValueError(f"unknown driver call {call!r}")

    def clear(self) -> None:
        """Takes back every failure that has not happened yet."""
        self._library.clear(self.machine)

    def calls(self, call: str) -> int:
        """How often ``call`` was made so far, failed calls included."""
        count = int(self._library.call_count(self.machine, call.encode()))
        if count < 0:
            raise ValueError(f"unknown driver call {call!r}")
        return count

    def used_bytes(self, device: int = 0) -> int:
        """Physical bytes in use on a device, by everybody."""
        return int(self._library.used_bytes(self.machine, device))

    def ledger(self) -> dict[str, int]:
        """What is alive on the machine, by kind."""
        return self._library.ledger(self.machine)

    def stream(self, index: int = 0, device: int = 0) -> int:
        """One of the streams that play torch's own; index 0 is the current one."""
        with self._lock:
            known = self._streams.setdefault(device, [])
            while len(known) < _STREAMS:
                known.append(self.new_stream(device))
            return known[index]

    def new_stream(self, device: int = 0, *, blocking: bool = False) -> int:
        """A stream that cumem has never heard of."""
        handle = self._library.stream_create(self.machine, device, int(not blocking))
        if not handle:
            raise ValueError(f"no device {device} on this emulated machine")
        return int(handle)

    def enqueue(
        self,
        *,
        stream: int | None = None,
        write: tuple[int, bytes] | None = None,
        read: tuple[int, bytearray] | None = None,
        delay: float = 0.0,
    ) -> None:
        """Puts work on a stream, as a kernel would be; it is done later, in order.

        Args:
            stream: where.
            write: device address, and the bytes to put there.
            read: device address, and the buffer to fill; keep it until it is done.
            delay: seconds that the work takes before it touches memory.
        """
        handle = self.stream() if stream is None else stream
        micros = int(delay * 1e6)
        if write is not None:
            at, data = write
            self._library.enqueue_write(self.machine, handle, at, data, len(data), micros)
        elif read is not None:
            at, buffer = read
            view = (ctypes.c_char * len(buffer)).from_buffer(buffer)
            self._library.enqueue_read(self.machine, handle, at, view, len(buffer), micros)
        else:
            self._library.enqueue_delay(self.machine, handle, micros)

    def begin_capture(self, stream: int | None = None) -> None:
        """Begins a graph capture on a stream, in the mode torch uses."""
        handle = self.stream() if stream is None else stream
        self._expect(self._library.begin_capture(handle), "begin_capture")
        self._capturing.add(handle)

    def end_capture(self, stream: int | None = None) -> None:
        """Ends a capture.

        Raises:
            RuntimeError: something invalidated it meanwhile.
        """
        handle = self.stream() if stream is None else stream
        self._capturing.discard(handle)
        self._expect(self._library.end_capture(handle), "end_capture")

    def set_attribute(self, attribute: int, value: int | None) -> None:
        """Overrides a device attribute (a CUdevice_attribute); None makes it unknown."""
        self._library.set_attribute(self.machine, attribute, -1 if value is None else value)

    def set_bandwidth(self, bytes_per_second: int) -> None:
        """Slows copies down; 0: as fast as they go."""
        self._library.set_bandwidth(self.machine, bytes_per_second)

    def set_host_limit(self, limit: int | None) -> None:
        """Most bytes of host memory that can be pinned; None: no limit."""
        self._library.set_host_limit(self.machine, (1 << 64) - 1 if limit is None else limit)

    def refuse_pinning(self, refuse: bool = True) -> None:  # noqa: FBT001, FBT002 - a switch
        """Makes the driver refuse to pin host memory, as for a user who may not."""
        self._library.set_host_refusal(self.machine, int(refuse))

    def poison(self, device: int = 0, code: str = "CUDA_ERROR_ILLEGAL_ADDRESS") -> None:
        """Ends the device's context, as an illegal access does; CUDA_SUCCESS revives it."""
        self._library.poison(self.machine, device, error_code(code))

    def is_capturing(self) -> bool:
        """Is the stream that plays the current one in a capture?"""
        known = self._streams.get(0, [])
        return bool(known) and known[0] in self._capturing

    def streams_of(self, device: int) -> list[int]:
        return [self.stream(index, device) for index in range(_STREAMS)]

    @staticmethod
    def _expect(code: int, what: str) -> None:
        if code != 0:
            raise RuntimeError(f"{what}: CUDA error {code}: the capture is not whole")


@contextmanager
def emulated_driver(
    capacity_bytes: int = 4 << 30,
    devices: int = 1,
    *,
    attributes: Mapping[int, int | None] | None = None,
) -> Iterator[EmulatedDriver]:
    """Puts a fresh emulated machine behind cumem within the block.

    Tensors made on the cpu inside a scope then live in emulated device memory.
    An allocation keeps its machine until it is freed, also after the block.

    Args:
        capacity_bytes: memory of each device, rounded down to 2 MiB.
        devices: how many devices, 1 to 64.
        attributes: device attributes (CUdevice_attribute) that differ from the
            emulator's own; None makes one unknown.

    Raises:
        ValueError: a machine cannot be like that.
    """
    emulator = library()
    sensible = _GRANULE <= capacity_bytes <= _MOST_BYTES
    machine = emulator.create(capacity_bytes, devices) if sensible else -1
    if machine < 0:
        raise ValueError(f"no machine of {devices} device(s) with {capacity_bytes} bytes each")
    before = emulator.select(machine)
    steering = EmulatedDriver(machine)
    for attribute, value in (attributes or {}).items():
        steering.set_attribute(attribute, value)
    previous = _runtime.replace(_make_runtime(steering, devices))
    state = _registry.replace(_registry.State())
    try:
        yield steering
    finally:
        _give_up_pools()
        _registry.replace(state)
        _runtime.replace(previous)
        emulator.select(before)


def process_machine() -> Runtime:
    """The emulated machine of a process that was started with ``CUMEM_DRIVER=emulated``."""
    options.check_emulated_machine()
    return _make_runtime(EmulatedDriver(0), None)


def _make_runtime(steering: EmulatedDriver, devices: int | None) -> Runtime:
    driver = _C.load_driver(_runtime.emulator_library())
    count = driver.device_count if devices is None else devices
    allocator = _C.Allocator(driver, _runtime.core_config(_runtime.current_options()))
    for device in range(count):
        # Opened while this machine is current: a device knows its machine from then on.
        allocator.device_info(device)
    backend = EmulatedBackend(count, steering.streams_of, steering.is_capturing)
    return Runtime(driver, allocator, backend, emulated=True)


def _give_up_pools() -> None:
    runtime = _runtime.if_started()
    if runtime is None:
        return
    from cumem import _snapshot

    _registry.retire(_registry.pools())
    _snapshot.drop_retired(runtime)
