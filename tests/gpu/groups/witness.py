"""What does another process see of the device, and can it take the memory?

The witness is a process that knows cuda-python and neither torch nor cumem. It is
started before what it is asked about, and does what it is told on its standard
input, one JSON line for one command.
"""

from __future__ import annotations

import json
import subprocess
import sys
from types import TracebackType
from typing import Any

_PIECE = 256 << 20
_GRANULE = 2 << 20


class Witness:
    """The other process, seen from the one that asks; a context manager."""

    def __init__(self, ordinal: int = 0) -> None:
        self._ordinal = ordinal
        self._process: subprocess.Popen[str] | None = None

    def __enter__(self) -> Witness:
        self._process = subprocess.Popen(
            [sys.executable, __file__, str(self._ordinal)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self.free_bytes()  # waits until its context is there
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._process is not None:
            self._process.communicate(timeout=60)  # it ends with its input

    def free_bytes(self) -> int:
        """Free memory of the device."""
        return self._do("free")

    def take(self, name: str, count: int) -> int:
        """Allocates ``count`` bytes, rounded down to granules; returns them."""
        return self._do("take", name, count)

    def take_all_but(self, name: str, left: int) -> int:
        """Allocates what is free but for ``left`` bytes; returns the bytes."""
        return self.take(name, self.free_bytes() - left)

    def dirty(self, name: str, value: int) -> None:
        """Writes bytes, other ones into each piece, to all memory taken as ``name``."""
        self._do("dirty", name, value)

    def give_back(self, name: str) -> None:
        """Frees the memory taken as ``name``."""
        self._do("give_back", name)

    def _do(self, verb: str, *arguments: object) -> int:
        process = self._process
        if process is None or process.stdin is None or process.stdout is None:
            raise RuntimeError("the witness was not started: use it as a context manager")
        process.stdin.write(json.dumps([verb, *arguments]) + "\n")
        process.stdin.flush()
        line = process.stdout.readline()
        answer = json.loads(line) if line else {"error": "it has ended"}
        if "error" in answer:
            raise AssertionError(f"the other process could not {verb}: {answer['error']}")
        return int(answer["value"])


class _Hands:
    """What the other process does; runs there."""

    def __init__(self, ordinal: int) -> None:
        import cuda_oracle
        from cuda.bindings import driver

        self._driver = driver
        self._oracle = cuda_oracle
        self._held: dict[str, list[tuple[int, int]]] = {}
        cuda_oracle.prepare(ordinal)

    def free(self) -> int:
        return self._oracle.free_bytes()

    def take(self, name: str, count: int) -> int:
        pieces = self._held.setdefault(name, [])
        left = count // _GRANULE * _GRANULE
        taken = left
        while left > 0:
            size = min(left, _PIECE)
            pieces.append((int(self._oracle.ask(self._driver.cuMemAlloc(size))), size))
            left -= size
        return taken

    def dirty(self, name: str, value: int) -> int:
        for index, (address, size) in enumerate(self._held[name]):
            byte = (value + 37 * index) % 256
            self._oracle.ask(self._driver.cuMemsetD8Async(address, byte, size, 0))
        self._oracle.ask(self._driver.cuCtxSynchronize())
        return 0

    def give_back(self, name: str) -> int:
        for address, _ in self._held.pop(name):
            self._oracle.ask(self._driver.cuMemFree(address))
        return 0


def _serve(ordinal: int) -> None:
    hands = _Hands(ordinal)
    for line in sys.stdin:
        verb, *arguments = json.loads(line)
        answer: dict[str, Any]
        try:
            answer = {"value": getattr(hands, verb)(*arguments)}
        except AssertionError as error:
            answer = {"error": str(error)}
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    _serve(int(sys.argv[1]))
