"""How do the tensors of a module that exists get into packed memory of cumem's own?

Note [One segment at a time]: a segment is taken, its tensors are copied to it, each
tensor object is pointed at its new place, and the old memory is given back, before the
next segment is taken. So the device needs room for one segment beside the model, and a
failure finds every tensor whole, at its old place or at its new one.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch

from cumem import _operation, _registry, _runtime, _snapshot, inspection, waking
from cumem._arguments import check_tag, pool_policy
from cumem._held import refuse_asleep, wait_for_devices
from cumem._matching import named_tensors
from cumem._packing import Batch, Places, packed
from cumem._relocation import relocate
from cumem._runtime import Runtime
from cumem._text import size, some
from cumem._units import Unit, units_of, unmovable
from cumem.errors import BusyError, CumemError
from cumem.options import OnSleep


@dataclass(frozen=True)
class Adopted:
    """What was moved; sizes in bytes.

    Attributes:
        tensors: how many tensors were moved.
        bytes: what they take, tied weights and overlapping views once.
        segments: how many segments were taken for them.
        segment_bytes: their bytes.
        left_bytes: old memory that something outside of the module still holds: views of
            its tensors, or what autograd saved.
    """

    tensors: int
    bytes: int
    segments: int
    segment_bytes: int
    left_bytes: int


def adopt(
    module: torch.nn.Module, tag: str = "weights", *, on_sleep: OnSleep | str | None = None
) -> Adopted:
    """Moves a module's live parameters and buffers into packed segments of ``tag``.

    The tensor objects stay, with their hooks, gradients (not moved) and strides; tied
    weights stay tied and overlapping views share memory as before. Each tensor starts at a
    multiple of 512 bytes, or touches the one it touched. Segments have 256 MiB or little
    more; one of them, or the largest tensor if that is more, is the room that it takes
    beside the model, if the old memory is not in an allocation with others. Afterwards
    segment bytes are at most 1.01 of the bytes that were moved, each tensor rounded up to
    512, and 2 MiB per device. What lies so already is left alone.

    Data pointers change: graphs captured before, and views of the tensors that the module
    does not have, go on with the old memory. Nobody else uses the module meanwhile.

    Args:
        module: all of it on devices that cumem serves; loaded anywhere, by any thread.
        tag: the name of the memory.
        on_sleep: what a sleep does with the contents, as for :func:`use_memory_pool`.

    Raises:
        ValueError: tensors on other devices or without memory (meta, sparse), all of them
            named; an empty tag, an unknown policy. TypeError: a wrong type.
        AsleepError: tensors that are asleep, all of them named.
        BusyError: a scope is open, or a capture is under way: old memory could not be
            given back. Nothing was changed by any of these.
        DeviceOutOfMemoryError, DriverError: the message says how much was moved. All
            tensors are valid, and the call can be repeated.
    """
    if not isinstance(module, torch.nn.Module):
        raise TypeError(f"expected a module, not {type(module).__name__}")
    check_tag(tag)
    policy = pool_policy(on_sleep, tag)
    runtime = _runtime.current()
    tensors = named_tensors(module)
    refused = unmovable(tensors, runtime.backend.device_type)
    if refused:
        raise ValueError(
            f"adopt({tag!r}): {len(refused)} tensor(s) cannot be moved: {some(refused)}. "
            "Nothing was changed."
        )
    waking.join_pending()
    operation = f"adopt({tag!r})"
    with _operation.exclusive(operation, _tags(tensors.values()) | {tag}):
        _refuse_busy(operation, runtime)
        refuse_asleep({name: [tensor] for name, tensor in tensors.items()}, operation)
        wait_for_devices(list(tensors.values()))
        places, units = Places(runtime), units_of(tensors.values())
        units = places.unpacked(units, tag, policy.value)
        _retire_pools(runtime, places, units)
        batches = packed(units, [places.device(unit) for unit in units])
        return _Move(runtime, operation, batches).run(tag, policy)


class _Move:
    """The way of all batches, one after the other."""

    def __init__(self, runtime: Runtime, operation: str, batches: list[Batch]) -> None:
        self._runtime = runtime
        self._operation = operation
        self._batches = batches
        self._storages = {
            unit.storage.cdata: (unit.storage, unit.tensors[0].untyped_storage().nbytes())
            for batch in batches
            for unit in batch.units
        }

    def run(self, tag: str, policy: OnSleep) -> Adopted:
        for number, batch in enumerate(self._batches):
            try:
                relocate(batch, tag, policy.value)
            except CumemError as error:
                raise type(error)(f"{error} {self._left(number)}") from error
            _snapshot.empty_cache(self._runtime)
        return self._report(tag)

    def _left(self, done: int) -> str:
        moved, rest = self._batches[:done], self._batches[done:]
        return (
            f"{self._operation}: {_count(moved)} tensors ({size(_bytes(moved))}) were moved, "
            f"{_count(rest)} ({size(_bytes(rest))}) are where they were; all are valid. Free "
            "memory and repeat the call: it goes on with the rest."
        )

    def _report(self, tag: str) -> Adopted:
        held = [bytes for storage, bytes in self._storages.values() if not storage.expired()]
        return Adopted(
            tensors=_count(self._batches),
            bytes=_bytes(self._batches),
            segments=len(self._batches),
            segment_bytes=self._segment_bytes(),
            left_bytes=sum(held),
        )

    def _segment_bytes(self) -> int:
        places = Places(self._runtime)
        found = [places.segment(batch.units[0].tensors[0].data_ptr()) for batch in self._batches]
        return sum(info.bytes for info in found if info is not None)


def _count(batches: Sequence[Batch]) -> int:
    return sum(len(unit.tensors) for batch in batches for unit in batch.units)


def _bytes(batches: Sequence[Batch]) -> int:
    return sum(unit.bytes for batch in batches for unit in batch.units)


def _tags(tensors: Iterable[torch.Tensor]) -> set[str]:
    return {tag for tensor in tensors if (tag := inspection.tag_of(tensor)) is not None}


def _refuse_busy(operation: str, runtime: Runtime) -> None:
    _operation.refuse_capture(operation, runtime)
    for scope in _registry.open_scopes():
        raise BusyError(
            f"{operation}: thread {scope.thread!r} has a scope of tag {scope.tag!r} open, so old "
            "memory could not be given back. Nothing was changed; leave the scope first."
        )
    for device in runtime.watched:
        if runtime.allocator.capturing(device):
            raise BusyError(
                f"{operation}: a CUDA graph capture is under way on {runtime.device_name(device)}. "
                "Nothing was changed; end the capture first."
            )


def _retire_pools(runtime: Runtime, places: Places, units: Sequence[Unit]) -> None:
    """Torch gives a pool's segments back only when the pool object is gone."""
    found = [places.segment(unit.address) for unit in units]
    numbers = {info.owner.pool for info in found if info is not None and not info.owner.graph}
    _registry.retire([entry for entry in _registry.pools() if entry.number in numbers])
    _snapshot.drop_retired(runtime)
