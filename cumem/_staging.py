"""How do bytes get between the host and any tensor, in bounded memory?

Pieces of a tensor pass through host memory of a fixed size: one half holds them as
they are in the file, the other as the tensor wants them. Where a tensor's elements
do not lie one after the other on a device, they pass through as much memory there,
in a segment of cumem's own, because torch would take what it needs from whatever
pool is open.
"""

from __future__ import annotations

import math
import mmap
from collections.abc import Iterable

import torch

from cumem import _owned, inspection

_TAG = "staging"


class Staging:
    """Host memory for pieces, twice ``bytes``, and device memory when it is needed.

    It goes back when the object does. Nothing is made inside a caller's scope.

    Args:
        bytes: the most that one piece may have.
    """

    def __init__(self, bytes: int) -> None:
        self.bytes = bytes
        # Memory that torch does not own is not placed into a pool, whatever scope is open.
        self.memory = memoryview(mmap.mmap(-1, 2 * bytes))
        self._host = torch.frombuffer(self.memory, dtype=torch.uint8)
        self._devices: dict[torch.device, torch.Tensor] = {}

    def prepare(self, views: Iterable[torch.Tensor]) -> None:
        """Takes the device memory that parts of these will pass through, if any will.

        Raises:
            DeviceOutOfMemoryError: there is no room.
        """
        for view in views:
            if view.device in self._devices or view.is_contiguous() or _is_plain(view):
                continue
            segment = _owned.allocate(
                self.bytes, tag=_TAG, on_sleep="keep", device=view.device.index
            )
            self._devices[view.device] = segment.tensor(torch.uint8, (self.bytes,))

    def elements(self, *dtypes: torch.dtype) -> int:
        """How many elements one piece may have."""
        return max(1, self.bytes // max(dtype.itemsize for dtype in dtypes))

    def piece(self, dtype: torch.dtype, shape: tuple[int, ...]) -> torch.Tensor:
        """The first half of the memory, seen as a contiguous tensor."""
        return _seen_as(self._host[: self.bytes], dtype, shape)

    def write(self, target: torch.Tensor, source: torch.Tensor) -> None:
        """Copies a part of :meth:`piece` to a part of any tensor, converting its type.

        pre: both have the same shape, no more than a piece's; :meth:`prepare` saw the tensor;
        runs under no_grad.
        """
        if _is_plain(target):
            copy(target, source)
            return
        if source.dtype != target.dtype or not source.is_contiguous():
            converted = _seen_as(self._host[self.bytes :], target.dtype, tuple(source.shape))
            copy(converted, source)
            source = converted
        if target.is_contiguous():
            copy(target, source)
            return
        through = self._on_device(target)
        copy(through, source)
        copy(target, through)

    def read(self, source: torch.Tensor) -> memoryview:
        """Copies a part of any tensor to the first half, row-major; valid until the next call.

        pre: as for :meth:`write`.
        """
        count = source.numel() * source.element_size()
        host = self.piece(source.dtype, tuple(source.shape))
        if not (_is_plain(source) or source.is_contiguous()):
            through = self._on_device(source)
            copy(through, source)
            source = through
        copy(host, source)
        return self.memory[:count]

    def _on_device(self, like: torch.Tensor) -> torch.Tensor:
        return _seen_as(self._devices[like.device], like.dtype, tuple(like.shape))


def copy(target: torch.Tensor, source: torch.Tensor) -> None:
    """``target.copy_(source)``, bit for bit where the types are one."""
    if target.dtype == source.dtype and target.element_size() == 1:
        # Types of which torch copies no more than it has to know: float4 and its like.
        target, source = target.view(torch.uint8), source.view(torch.uint8)
    target.copy_(source)


def _seen_as(memory: torch.Tensor, dtype: torch.dtype, shape: tuple[int, ...]) -> torch.Tensor:
    count = math.prod(shape) * dtype.itemsize
    return memory[:count].view(dtype).view(shape)


def _is_plain(tensor: torch.Tensor) -> bool:
    """Memory of the host, where torch copies without help; not emulated device memory."""
    return tensor.device.type == "cpu" and inspection.tag_of(tensor) is None
