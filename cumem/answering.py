"""How does one process ask another where its memory is?

Only a process that agreed is asked: it listens on a socket of its user's, and writes
its report to whoever connects. Nothing is read from the one who asks.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import logging
import os
import socket
import stat
import threading
from pathlib import Path
from typing import Any

from cumem import options
from cumem.errors import CumemError
from cumem.reporting import report

_log = logging.getLogger("cumem")
_SUFFIX = ".sock"
_SECONDS = 10.0  # that a connection may take
_PAUSE = 1.0  # seconds, where the system refuses one


class _Listener:
    """The socket of this process, and the thread that answers on it."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.pid = os.getpid()
        self.servers = 0
        self._closed = threading.Event()
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            with contextlib.suppress(FileNotFoundError):  # left by a dead process of our number
                path.unlink()
            self._socket.bind(str(path))
            path.chmod(0o600)
            self._socket.listen()
            # It never keeps the process from ending; close() has ended it before the
            # interpreter goes, so that it cannot come back from the core after that.
            self._thread = threading.Thread(target=self._run, name="cumem-report", daemon=True)
            self._thread.start()
        except BaseException:
            self._socket.close()
            raise

    def close(self) -> None:
        """In a forked child it only lets go."""
        if self.pid == os.getpid() and self._thread.is_alive():
            self._closed.set()
            self._socket.shutdown(socket.SHUT_RDWR)  # ends accept()
            self._thread.join()
            self.path.unlink(missing_ok=True)
        self._socket.close()

    def _run(self) -> None:
        while not self._closed.is_set():
            try:
                connection, _ = self._socket.accept()
            except OSError as error:  # closed, or the process has too many files open
                if not self._closed.wait(_PAUSE):
                    _log.warning("a report could not be asked for: %s", error)
                continue
            with connection:
                try:
                    connection.settimeout(_SECONDS)
                    connection.sendall(_answer())
                except OSError as error:  # who asked is gone; the next one is answered
                    _log.info("a report was not taken: %s", error)


_lock = threading.RLock()
_listeners: dict[tuple[int, Path], _Listener] = {}  # of this process, and of whom it was forked


class ReportServer:
    """Answers ``python -m cumem report``; :func:`serve_reports` returns one.

    Those of one process share a socket, which is there until the last is closed.

    Attributes:
        path: the socket.
    """

    def __init__(self) -> None:
        self.path = _private_folder(make=True) / f"{os.getpid()}{_SUFFIX}"
        key = (os.getpid(), self.path)
        with _lock:
            if key not in _listeners:
                _listeners[key] = _Listener(self.path)
            self._listener: _Listener | None = _listeners[key]
            self._listener.servers += 1
        atexit.register(self.close)

    def close(self) -> None:
        """Stops answering; once or more often. In a forked child it only lets go."""
        atexit.unregister(self.close)
        with _lock:
            listener, self._listener = self._listener, None
            if listener is None:
                return
            listener.servers -= 1
            if listener.servers == 0:
                del _listeners[listener.pid, listener.path]
                listener.close()

    def __enter__(self) -> ReportServer:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


def serve_reports() -> ReportServer:
    """Lets other processes of this user ask where this one's memory is.

    ``python -m cumem report --pid PID`` then shows what :func:`report` says here. The
    socket is in ``XDG_RUNTIME_DIR`` (or a folder among temporary files that only this
    user can enter); it is gone when the process ends.

    Returns:
        The server; its ``close()`` stops it, and so does the end of a ``with`` block.

    Raises:
        CumemError: the folder is not this user's alone.
        OSError: no socket can be made there.
    """
    return ReportServer()


def pids() -> list[int]:
    """Processes of this user that may answer.

    Raises:
        CumemError: the folder is not this user's alone.
    """
    folder = _private_folder(make=False)
    found = folder.glob(f"*{_SUFFIX}") if folder.is_dir() else ()
    return sorted(int(path.stem) for path in found if path.stem.isdecimal())


def ask(pid: int) -> dict[str, Any] | None:
    """What another process answers: ``{"text": ..., "report": {...}}``; None if it does not.

    Raises:
        CumemError: the folder is not this user's alone, the process says what went wrong, or
            it ended in the middle of its answer.
        OSError: the connection broke.
    """
    path = _private_folder(make=False) / f"{pid}{_SUFFIX}"
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
        connection.settimeout(_SECONDS)
        try:
            connection.connect(str(path))
        except (FileNotFoundError, ConnectionRefusedError):  # a dead process leaves a socket
            return None
        with connection.makefile("rb") as stream:
            text = stream.read()
    try:
        answer: dict[str, Any] = json.loads(text)
    except ValueError as error:
        raise CumemError(f"process {pid} broke its answer off; did it end?") from error
    if "error" in answer:
        raise CumemError(f"process {pid}: {answer['error']}")
    return answer


def _answer() -> bytes:
    try:
        found = report()
        answer = {"text": str(found), "report": found.as_dict()}
    except CumemError as error:
        answer = {"error": str(error)}
    except Exception as error:  # noqa: BLE001 - told to who asked; the next is answered too
        _log.exception("a report failed")
        answer = {"error": f"its report failed ({type(error).__name__}: {error})"}
    return json.dumps(answer).encode()


def _private_folder(*, make: bool) -> Path:
    """The folder of the sockets, which must be ours alone where it exists.

    Raises:
        CumemError: it is somebody else's, or others can enter it.
    """
    folder = options.runtime_folder()
    if make:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    try:
        found = folder.lstat()
    except FileNotFoundError:
        return folder
    private = stat.S_ISDIR(found.st_mode) and not found.st_mode & 0o077
    if not private or found.st_uid != os.getuid():
        raise CumemError(
            f"{folder} is not a folder of this user alone; nothing was opened. Remove it, or set "
            "XDG_RUNTIME_DIR to a private folder"
        )
    return folder
