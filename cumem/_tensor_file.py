"""How are the tensors of a safetensors file read, a bounded piece at a time?

With reads and not through a map: what a file does not give is an error then, and not
a signal that ends the process.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch

from cumem._boxes import Box, first_element, shape_of
from cumem._dtypes import torch_dtype, torch_shape
from cumem._safetensors import Header, TensorEntry, fault
from cumem._staging import Staging


class TensorFile:
    """An open file of tensors."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor

    def read(self, entry: TensorEntry, piece: Box, staging: Staging) -> torch.Tensor:
        """A piece of a tensor; valid until the next read.

        Raises:
            OSError: the file cannot be read, or ends early.
        """
        dtype = dtype_of(entry)
        shape = shape_of(piece)
        start = entry.begin + first_element(piece, torch_shape(entry)) * dtype.itemsize
        self.read_bytes(staging.memory[: math.prod(shape) * dtype.itemsize], start)
        return staging.piece(dtype, shape)

    def read_bytes(self, memory: memoryview, start: int) -> None:
        """Fills ``memory`` with the file's bytes from ``start`` on; any thread may.

        Raises:
            OSError: the file cannot be read, or ends early.
        """
        done = 0
        while done < len(memory):
            count = os.preadv(self._descriptor, [memory[done:]], start + done)
            if count == 0:
                raise OSError(f"it ends at byte {start + done}, and was longer before")
            done += count


@contextmanager
def opened(header: Header, left: Callable[[], str]) -> Iterator[TensorFile]:
    """The file of a header, as long as it was when it was judged.

    Args:
        header: what the file holds.
        left: says what is left, when the file cannot be read within the block.

    Raises:
        CheckpointError: it cannot be opened or read, or is not the file that was judged.
    """
    try:
        descriptor = os.open(header.path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            if os.fstat(descriptor).st_size != header.file_bytes:
                raise OSError("its length changed since its header was read")
            yield TensorFile(descriptor)
        finally:
            os.close(descriptor)
    except OSError as error:
        what = f"it cannot be read ({error.strerror or error})"
        raise fault(header.path, what, left()) from error


def dtype_of(entry: TensorEntry) -> torch.dtype:
    """Torch's type. pre: torch has it."""
    dtype = torch_dtype(entry)
    assert dtype is not None
    return dtype
