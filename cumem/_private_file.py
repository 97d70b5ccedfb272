"""How does a file appear whole, or not at all?

It is written beside its place under another name, readable by its owner alone from
its first instant, and takes its place once it is on the disk.
"""

from __future__ import annotations

import errno
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


class PrivateFile:
    """A file under way."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor

    def reserve(self, size: int) -> None:
        """Takes the room for ``size`` bytes now, where the file system can.

        Raises:
            OSError: there is not that much.
        """
        try:
            os.posix_fallocate(self._descriptor, 0, size)
        except OSError as error:
            if error.errno not in (errno.EOPNOTSUPP, errno.EINVAL, errno.ENODEV):
                raise

    def write(self, data: bytes | memoryview) -> None:
        """Appends all of ``data``.

        Raises:
            OSError: it cannot be written.
        """
        rest = memoryview(data)
        while len(rest):
            rest = rest[os.write(self._descriptor, rest) :]

    def rewrite(self, data: bytes) -> None:
        """Puts ``data`` over the first bytes of what was written.

        Raises:
            OSError: it cannot be written.
        """
        done = 0
        while done < len(data):
            done += os.pwrite(self._descriptor, data[done:], done)


@contextmanager
def replacing(path: Path) -> Iterator[PrivateFile]:
    """A file that takes the place of ``path`` when the block ends well, and is gone otherwise.

    Raises:
        OSError: it cannot be made, written or put in place; then ``path`` is what it was.
    """
    descriptor, name = tempfile.mkstemp(prefix=".cumem-", dir=path.parent)
    try:
        try:
            yield PrivateFile(descriptor)
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
        os.replace(name, path)
    except BaseException:
        os.unlink(name)
        raise
    _sync_folder(path.parent)


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
