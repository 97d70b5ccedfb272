"""Are a snapshot's contents what was saved?

Each tensor has a digest among the notes of the file. A file is long, and a restored
module is trusted: a byte that a disk or a copy got wrong would change answers and raise
no error. So all of it is read and proven before the first byte is written to the module.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor

from cumem._safetensors import Header, TensorEntry, brief, fault
from cumem._tensor_file import TensorFile, opened
from cumem._text import some

ALGORITHM = "sha256"  # processors have instructions for it
DIGITS = 2 * hashlib.new(ALGORITHM).digest_size
UNKNOWN = "0" * DIGITS  # keeps the place of one in a header

_MOST_THREADS = 16
_BUFFER_BYTES = 1 << 20  # of each thread; Python lets others run while one is digested


def written(
    parts: Iterable[tuple[str, memoryview]], names: Iterable[str], write: Callable[..., None]
) -> dict[str, str]:
    """Writes the parts and returns the digest of each tensor, also of those without a part.

    Args:
        parts: a name and bytes of its tensor, in order; bytes are valid until the next part.
        names: of all tensors.
        write: puts bytes into the file.
    """
    digests = {name: hashlib.new(ALGORITHM) for name in names}
    with ThreadPoolExecutor(1, "cumem-digest") as beside:
        for name, part in parts:
            digested = beside.submit(digests[name].update, part)
            write(part)
            digested.result()
    return {name: digest.hexdigest() for name, digest in digests.items()}


def refuse_damaged(header: Header, digests: Mapping[str, str]) -> None:
    """Reads all tensors of a file and compares their digests.

    Raises:
        CheckpointError: some differ, all of them are named, or the file cannot be read.
            Nothing was loaded.
    """
    with opened(header, lambda: "Nothing was loaded.") as file:

        def is_damaged(entry: TensorEntry) -> bool:
            return _digest(file, entry) != digests[entry.name]

        entries = list(header.tensors.values())
        threads = min(_MOST_THREADS, len(os.sched_getaffinity(0)))
        with ThreadPoolExecutor(threads, "cumem-digest") as pool:
            damaged = [
                brief(entry.name)
                for entry, is_so in zip(entries, pool.map(is_damaged, entries), strict=True)
                if is_so
            ]
    if damaged:
        what = f"{len(damaged)} of {len(entries)} tensor(s) are not what was saved"
        raise fault(header.path, f"{what}: {some(damaged)}")


def _digest(file: TensorFile, entry: TensorEntry) -> str:
    digest, memory = hashlib.new(ALGORITHM), memoryview(bytearray(_BUFFER_BYTES))
    for start in range(entry.begin, entry.end, _BUFFER_BYTES):
        part = memory[: min(_BUFFER_BYTES, entry.end - start)]
        file.read_bytes(part, start)
        digest.update(part)
    return digest.hexdigest()
