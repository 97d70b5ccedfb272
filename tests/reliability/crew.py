"""Threads that work at once, and an end to them when they hang."""

from __future__ import annotations

import faulthandler
import itertools
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

SECONDS = 3.0


@contextmanager
def watchdog(seconds: float = 60) -> Iterator[None]:
    """Shows where every thread is and ends the process when the block takes too long."""
    faulthandler.dump_traceback_later(seconds, exit=True)
    try:
        yield
    finally:
        faulthandler.cancel_dump_traceback_later()


class Crew:
    """Threads that repeat their work until all are told to stop; their failures are shown."""

    def __init__(self) -> None:
        self.stop = threading.Event()
        self.rounds: dict[str, int] = {}
        self._threads: list[threading.Thread] = []
        self._failures: list[BaseException] = []

    def add(self, name: str, work: Callable[[int], object]) -> None:
        def repeat() -> None:
            try:
                for number in itertools.count():
                    if self.stop.is_set():
                        break
                    work(number)
                    self.rounds[name] = number + 1
            except BaseException as error:  # noqa: BLE001 - shown by run()
                self._failures.append(error)
                self.stop.set()

        self._threads.append(threading.Thread(target=repeat, name=name))

    def run(self, seconds: float = SECONDS) -> None:
        with watchdog():
            for thread in self._threads:
                thread.start()
            self.stop.wait(seconds)
            self.stop.set()
            for thread in self._threads:
                thread.join()
        if self._failures:
            raise self._failures[0]
        assert len(self.rounds) == len(self._threads), "some thread never got to work"
