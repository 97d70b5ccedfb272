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


class UnsyncedFolderError(OSError):
    """The file is in its place, and after a failure of power the older one may be there."""


@contextmanager
def replacing(path: Path) -> Iterator[PrivateFile]:
    """A file that takes the place of ``path`` when the block ends well, and is gone otherwise.

    Raises:
        UnsyncedFolderError: it is in place, only not on the disk for certain.
        OSError: it cannot be made, written or put in place; then ``path`` is what it was.
    """
    with _opened_folder(path.parent) as folder:
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
        _sync_folder(folder)


@contextmanager
def _opened_folder(folder: Path) -> Iterator[int]:
    """Before anything is written: where it cannot be opened, nothing is replaced."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def _sync_folder(descriptor: int) -> None:
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.EOPNOTSUPP):  # file systems without it
            raise UnsyncedFolderError(*error.args) from error
