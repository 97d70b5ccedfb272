"""How does a thread allocate memory that never sleeps, inside an open scope?"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from cumem import _registry, _runtime, _snapshot
from cumem._devices import DeviceLike, device_index
from cumem._registry import PoolEntry
from cumem.options import OnSleep

_NO_TAG = ""  # no scope can have it, so nobody else checks such a pool out


@contextmanager
def outside_pools(device: DeviceLike = None) -> Iterator[None]:
    """Sends this thread's allocations on ``device`` to torch's own memory within the block.

    The memory goes back to torch's cache when its tensors die and no scope is open.

    Raises:
        ValueError: no such device. DriverError: no usable driver.
    """
    runtime = _runtime.current()
    index = device_index(device, runtime)
    handle = runtime.backend.make_plain_pool(index)
    entry = PoolEntry(_NO_TAG, index, OnSleep.KEEP, graph=False, handle=handle, in_use=True)
    _registry.add(entry)
    try:
        with runtime.backend.use_pool(handle, index):
            yield
    finally:
        # Torch must not lose a pool while a scope is open: it waits among the retired.
        del handle
        _registry.check_in(entry)
        _registry.retire([entry])
        _snapshot.drop_retired(runtime)
