"""How much device memory is free, as a process sees it that knows only the driver?"""

from __future__ import annotations

import importlib.util
import subprocess
import sys


class Outside:
    """Another process with a context of its own; a context manager.

    Without cuda-python, or where the driver is emulated, it sees nothing:
    :meth:`free_bytes` is None and ``blind`` says why.
    """

    def __init__(self, *, emulated: bool) -> None:
        self.blind = _why_blind(emulated=emulated)
        self._process: subprocess.Popen[str] | None = None

    def __enter__(self) -> Outside:
        if not self.blind:
            self._process = subprocess.Popen(
                [sys.executable, __file__],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
            )
            self.free_bytes()  # waits until its context is there
        return self

    def __exit__(self, *error: object) -> None:
        if self._process is not None:
            self._process.communicate(timeout=60)  # it ends with its input

    def free_bytes(self) -> int | None:
        """Free memory of the first visible device."""
        process = self._process
        if process is None or process.stdin is None or process.stdout is None:
            return None
        process.stdin.write("free\n")
        process.stdin.flush()
        return int(process.stdout.readline())


def _why_blind(*, emulated: bool) -> str:
    if emulated:
        return "the driver is emulated"
    missing = importlib.util.find_spec("cuda") is None or not importlib.util.find_spec(
        "cuda.bindings"
    )
    return "cuda-python is not installed" if missing else ""


def _serve() -> None:
    from cuda.bindings import driver

    def ask(answer: tuple[object, ...]) -> object:
        code, *values = answer
        if code != driver.CUresult.CUDA_SUCCESS:
            raise RuntimeError(f"the driver answered {code}")
        return values[0] if len(values) == 1 else tuple(values)

    ask(driver.cuInit(0))
    ask(driver.cuCtxPushCurrent(ask(driver.cuDevicePrimaryCtxRetain(ask(driver.cuDeviceGet(0))))))
    for _ in sys.stdin:
        answer = ask(driver.cuMemGetInfo())
        assert isinstance(answer, tuple)
        print(int(answer[0]), flush=True)


if __name__ == "__main__":
    _serve()
