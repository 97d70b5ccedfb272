"""A server of ours as a process, for the tests that talk to it from outside."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import threading
from types import TracebackType
from typing import Any

import pytest

httpx = pytest.importorskip("httpx", reason="needs httpx, of the test extra")
pytest.importorskip("uvicorn", reason="needs uvicorn, of the serve extra")
pytest.importorskip("starlette", reason="needs Starlette, of the serve extra")

SECONDS = 120.0


class ServerProcess:
    """``python -m cumem serve`` on a free port of this machine, on the emulated driver."""

    def __init__(self, *words: str) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "cumem", "serve", "--port", "0", "--context", "64", *words],
            env={**os.environ, "CUMEM_DRIVER": "emulated", "OMP_NUM_THREADS": "1"},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        self._watchdog = threading.Timer(SECONDS, self._process.kill)
        self._watchdog.start()
        self.printed: list[str] = []
        self.url = self._wait_for_url()
        self.client = httpx.Client(base_url=self.url, timeout=SECONDS)

    def _wait_for_url(self) -> str:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            self.printed.append(line)
            if found := re.search(r"listening on (http://\S+/);", line):
                return found[1]
        raise AssertionError(f"the server did not start: {self._process.communicate()}")

    def interrupt(self) -> tuple[int, str, str]:
        """Ctrl-C; returns the exit status and what was still printed."""
        self._process.send_signal(signal.SIGINT)
        out, err = self._process.communicate(timeout=SECONDS)
        return self._process.returncode, out, err

    def __enter__(self) -> ServerProcess:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.client.close()
        self._watchdog.cancel()
        if self._process.poll() is None:
            self._process.kill()
            self._process.communicate()

    def post(self, path: str, **options: Any) -> Any:
        return self.client.post(path, **options)

    def get(self, path: str, **options: Any) -> Any:
        return self.client.get(path, **options)
