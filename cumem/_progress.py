"""How does who waits for a long load see how far it is?"""

from __future__ import annotations

import importlib
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

_SHOW_AFTER = 1.0  # seconds: what takes less needs no bar
_REFRESH = 0.1


@contextmanager
def shown(total: int, moved: Callable[[], int]) -> Iterator[None]:
    """A bar on a terminal, where tqdm is installed and the load takes long enough.

    Args:
        total: bytes to move.
        moved: how many were moved so far; asked from another thread.
    """
    try:
        tqdm = importlib.import_module("tqdm")
    except ImportError:
        yield
        return
    over = threading.Event()
    bar = tqdm.tqdm(
        total=total, unit="B", unit_scale=True, desc="loading", delay=_SHOW_AFTER, disable=None
    )

    def show() -> None:
        while not over.wait(_REFRESH):
            bar.update(moved() - bar.n)

    thread = threading.Thread(target=show, name="cumem-progress")
    with bar:
        if not bar.disable:
            thread.start()
        try:
            yield
        finally:
            over.set()
            if thread.ident is not None:
                thread.join()
        bar.update(moved() - bar.n)
