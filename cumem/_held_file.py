"""Is a file that is held open the one whose header was judged?"""

from __future__ import annotations

import hashlib
import os

from cumem import _C
from cumem._safetensors import Header, fault


def held_file(header: Header, left: str = "Nothing was loaded.") -> _C.File:
    """The file, held open for the core; it is the one whose header was read.

    Args:
        header: what the file holds.
        left: says what is left, for the message of an error.

    Raises:
        CheckpointError: it cannot be opened or read, or was changed meanwhile.
        StatusError: the core cannot hold it.
    """
    try:
        with header.path.open("rb", buffering=0) as file:
            text = file.read(header.header_bytes)
            same = hashlib.sha256(text).hexdigest() == header.digest
            if not same or os.fstat(file.fileno()).st_size != header.file_bytes:
                raise fault(header.path, "it was changed while it was read", left)
            return _C.File(file.fileno(), str(header.path), header.header_bytes)
    except OSError as error:
        what = f"it cannot be read ({error.strerror or error})"
        raise fault(header.path, what, left) from error
