"""The real server as a process, as a client of HTTP sees it."""

from __future__ import annotations

import http.client
import json
import re
import signal
import subprocess
import sys
import threading
import time
from contextlib import closing
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

from processes import say

_LONGEST = 300.0  # seconds for any one thing that the server is asked for
_GRACE = 60.0  # seconds for its end


@dataclass(frozen=True)
class Text:
    """What a stream brought, and when.

    Attributes:
        text: the whole of it.
        first: when the first piece was there, on the clock of ``time.perf_counter``.
        first_seconds: from before the connection was made to the first piece.
        rest_seconds: from the first piece to the last.
    """

    text: str
    first: float
    first_seconds: float
    rest_seconds: float


class Server:
    """``python -m cumem serve`` on a free port; a context manager, which ends it.

    Args:
        words: further arguments of the command.

    Attributes:
        started: just before the process was made, on the clock of ``time.perf_counter``.

    Raises:
        SystemExit: it did not start; or, at the end of a block without an error, it did not
            end with status 0 after an interrupt.
    """

    def __init__(self, *words: str) -> None:
        command = [sys.executable, "-m", "cumem", "serve", "--port", "0", *words]
        self.started = time.perf_counter()
        self._process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        try:
            self._netloc = self._address()
        except BaseException:
            self._stop()
            raise

    def _address(self) -> str:
        """Where it listens; it says so once the model is loaded."""
        assert self._process.stdout is not None
        watchdog = threading.Timer(_LONGEST, self._process.kill)
        watchdog.start()
        try:
            for line in self._process.stdout:
                if found := re.search(r"listening on (http://\S+/);", line):
                    return urlsplit(found[1]).netloc
        finally:
            watchdog.cancel()
        raise SystemExit(f"the server did not start: status {self._process.wait()}")

    def __enter__(self) -> Server:
        return self

    def __exit__(self, kind: type[BaseException] | None, *error: object) -> None:
        status = self._stop()
        if status == 0:
            return
        why = f"the server ended with status {status} after an interrupt"
        if kind is None:
            raise SystemExit(why)
        say(why)  # beside the error of the block, which matters more

    def _stop(self) -> int:
        """Interrupts it; killed where it does not end. Returns its exit status."""
        if self._process.poll() is None:
            self._process.send_signal(signal.SIGINT)
        try:
            self._process.communicate(timeout=_GRACE)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.communicate()
        return self._process.returncode

    def generate(self, prompt: str, tokens: int) -> Text:
        """A stream of so many tokens; the likeliest ones, so the same for the same prompt."""
        wanted = {"prompt": prompt, "max_tokens": tokens, "stream": True}
        pieces, times = [], []
        asked = time.perf_counter()
        with closing(self._connect()) as connection:
            response = self._send(connection, "POST", "/generate", json.dumps(wanted))
            while line := response.readline():
                times.append(time.perf_counter())
                pieces.append(line)
        *lines, last = [json.loads(piece) for piece in pieces]
        if last != {"done": True} or not lines:
            raise SystemExit(f"the stream ended with {last}")
        text = "".join(line["text"] for line in lines)
        return Text(text, times[0], times[0] - asked, times[len(lines) - 1] - times[0])

    def post(self, path: str) -> tuple[float, dict[str, Any]]:
        """Seconds until the answer was there, and the answer."""
        asked = time.perf_counter()
        body = self._whole("POST", path)
        return time.perf_counter() - asked, json.loads(body)

    def get(self, path: str) -> dict[str, Any]:
        return dict(json.loads(self._whole("GET", path)))

    def pools(self) -> dict[str, int]:
        """Bytes of the segments of each pool, by its tag."""
        return {tag["tag"]: tag["segment_bytes"] for tag in self.get("/memory")["tags"]}

    def _whole(self, method: str, path: str) -> bytes:
        with closing(self._connect()) as connection:
            return self._send(connection, method, path).read()

    def _connect(self) -> http.client.HTTPConnection:
        """A new one each time: the server closes those that were idle for some seconds."""
        return http.client.HTTPConnection(self._netloc, timeout=_LONGEST)

    def _send(
        self,
        connection: http.client.HTTPConnection,
        method: str,
        path: str,
        body: str | None = None,
    ) -> http.client.HTTPResponse:
        connection.request(method, path, body)
        response = connection.getresponse()
        if response.status != 200:
            raise SystemExit(f"{path}: {response.status} {response.read().decode()}")
        return response
