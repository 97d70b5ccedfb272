"""How is a tensor object pointed at other memory with the same bytes?

Its identity, its hooks and its gradient stay, because only its data is exchanged.
"""

# mypy: disable-error-code="no-untyped-call"
from __future__ import annotations

import torch

from cumem import _keep, _owned
from cumem._held import wait_for_devices
from cumem._packing import Batch
from cumem._units import Unit


def relocate(batch: Batch, tag: str, on_sleep: str) -> None:
    """Moves the units of a batch to a new segment.

    Raises:
        CumemError: no room, or the driver refused. Whatever else is raised, too, leaves
            every tensor of the batch where it was.
    """
    segment = _owned.allocate(batch.bytes, tag=tag, on_sleep=on_sleep, device=batch.device)
    targets = [
        segment.tensor(torch.uint8, (unit.bytes,), offset)
        for unit, offset in zip(batch.units, batch.offsets, strict=True)
    ]
    with torch.no_grad():
        for unit, target in zip(batch.units, targets, strict=True):
            target.copy_(_bytes_of(unit))
    wait_for_devices(targets)
    kept = [_keep.is_kept(unit.tensors[0]) for unit in batch.units]
    _exchange(batch, targets)
    for unit, protected in zip(batch.units, kept, strict=True):
        if protected:
            _keep.keep(unit.tensors)


def _exchange(batch: Batch, targets: list[torch.Tensor]) -> None:
    """All tensors of the batch, or none."""
    done: list[tuple[torch.Tensor, torch.Tensor]] = []
    try:
        for unit, target in zip(batch.units, targets, strict=True):
            for tensor in unit.tensors:
                before = _like(tensor, tensor.untyped_storage(), 0)
                _set_data(tensor, _like(tensor, target.untyped_storage(), unit.begin))
                done.append((tensor, before))
    except BaseException:
        for tensor, before in reversed(done):
            _set_data(tensor, before)
        raise


def _bytes_of(unit: Unit) -> torch.Tensor:
    member = unit.tensors[0]
    return _over(member.untyped_storage(), torch.uint8, unit.begin, (unit.bytes,), (1,))


def _like(tensor: torch.Tensor, storage: torch.UntypedStorage, begin: int) -> torch.Tensor:
    """A tensor as ``tensor`` is, in a storage that starts at byte ``begin`` of its own."""
    offset = int(tensor.storage_offset()) - begin // tensor.element_size()
    with torch.inference_mode(tensor.is_inference()):  # what it is made in becomes its kind
        return _over(storage, tensor.dtype, offset, tuple(tensor.shape), tensor.stride())


def _over(
    storage: torch.UntypedStorage,
    dtype: torch.dtype,
    offset: int,
    shape: tuple[int, ...],
    strides: tuple[int, ...],
) -> torch.Tensor:
    # No mode of the caller's should see how it is made.
    with torch._C.DisableTorchFunction(), torch._C._DisableTorchDispatch():
        tensor = torch.empty(0, dtype=dtype, device=storage.device)
        return tensor.set_(storage, offset, shape, strides)


def _set_data(tensor: torch.Tensor, data: torch.Tensor) -> None:
    with torch._C.DisableTorchFunctionSubclass():
        tensor.data = data
