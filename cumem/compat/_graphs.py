"""Which pool does the private memory of a captured graph go to?

Captures that name the same pool share it, as graphs of torch's do, and one pool can be
captured into again after its scope was left.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

from cumem import _runtime
from cumem._devices import device_index
from cumem.options import OnSleep
from cumem.pool import Pool, graph_pool

PoolId = tuple[int, int]  # torch's
_Key = tuple[object, ...]


class GraphPools:
    """Pools for captured graphs, by what the caller calls them."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._pools: dict[_Key, Pool] = {}

    @contextmanager
    def opened(self, name: object, tag: str, on_sleep: OnSleep) -> Iterator[Pool]:
        """The pool of this name on the current device, open for captures.

        Args:
            name: whatever tells pools apart, or the id of one of ours; None: a new pool.

        Raises:
            BusyError: a capture into it is under way. AsleepError: it sleeps.
        """
        key = (device_index(None, _runtime.current()), name, tag, on_sleep)
        known = None if name is None else self._find(key, name)
        with known.reopen() if known is not None else graph_pool(tag, on_sleep=on_sleep) as pool:
            if known is None:
                self._remember(key if name is not None else (*key, pool.id), pool)
            yield pool

    def clear(self) -> None:
        """Forgets all of them; their memory stays as long as a graph uses it."""
        with self._lock:
            self._pools.clear()

    def _find(self, key: _Key, name: object) -> Pool | None:
        with self._lock:
            self._pools = {known: pool for known, pool in self._pools.items() if pool.is_usable}
            found = self._pools.get(key)
            ours = [pool for pool in self._pools.values() if pool.id == name]
        return found or (ours[0] if ours else None)

    def _remember(self, key: _Key, pool: Pool) -> None:
        with self._lock:
            self._pools[key] = pool
