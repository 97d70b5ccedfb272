"""How does a checkpoint come to the device in one stream, and again after a sleep?

Each file becomes one segment of cumem's own with the file's bytes in their order, so
that it is read once, from end to end, and the tensors are views of it. How bytes get
from the file to the device is in csrc/core/staging.h; how a segment comes back from its
file is in csrc/core/source.h.
"""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path

import torch

from cumem import _C, _declared, _loading, _owned, _registry, _runtime, _snapshot
from cumem._checkpoint import Checkpoint, read_checkpoint
from cumem._devices import DeviceLike
from cumem._dtypes import torch_dtype, torch_shape
from cumem._held_file import held_file
from cumem._owned import OwnedSegment
from cumem._progress import shown
from cumem._registry import PoolEntry
from cumem._runtime import Runtime
from cumem._safetensors import Header, TensorEntry, fault
from cumem._text import choices
from cumem.errors import BusyError, translated
from cumem.options import OnSleep

# Kernels load 16 bytes at once, and digests start where they do.
_ALIGNMENT = 16

_LEFT = "Nothing was loaded."


def load_file(
    path_or_dir: str | Path,
    *,
    tag: str = "weights",
    device: DeviceLike = None,
    on_sleep: OnSleep | str | None = None,
    pin_file: bool = False,
) -> dict[str, torch.Tensor]:
    """Loads a checkpoint to the device; returns its tensors by name.

    Each file takes one segment of exactly its tensors' bytes, rounded up to 2 MiB, and
    is read by several threads straight into it through at most
    ``Options.load_ring_bytes`` of pinned host memory. The tensors are views that copy
    nothing and start at multiples of 16 bytes; a segment is given back when the last of
    its tensors dies.

    Args:
        path_or_dir: a safetensors file, or a folder with ``model.safetensors``, with a
            sharded checkpoint and its index, or with one safetensors file.
        tag: the name of the memory.
        device: a device, its index, or None for the current one.
        on_sleep: as for :func:`cumem.use_memory_pool`, or ``"reload"``: no host copy is
            kept, and a wake reads the file again. The file is held open and must not be
            changed; a sleep and a wake refuse when it was. What was written to the
            tensors since is noticed and backed up, where the device can compute digests;
            where it cannot, a sleep backs up everything, or under
            ``Options(clean_check="declared")`` what :func:`cumem.mark_dirty` named.
        pin_file: with ``"reload"``: read the file's own pages, and keep them pinned while
            a tensor lives, so that a wake copies straight from them. The load itself is
            slower. No copy of the file is made, and processes share its pages; but the
            system cannot use that memory for anything else (it does not count for
            ``Options.host_limit_bytes``). Where the driver refuses to pin them, and
            ``Options.allow_pageable`` is set, the file is read as without this;
            ``stats().pinned_file_bytes`` tells.

    Raises:
        CheckpointError: a faulty file, a type that torch has not, or a file that changed
            or could not be read.
        DeviceOutOfMemoryError, HostOutOfMemoryError: no room; the latter also for pages
            to be pinned, or where the driver refused and ``allow_pageable`` is not set.
        BusyError: a graph capture is under way.
        ValueError: an empty tag, an unknown policy, no such device, or ``pin_file`` without
            ``"reload"``. TypeError: a wrong type.
        DriverError: no usable driver, or it refused. Nothing is left by any of these.
    """
    _check_pin(pin_file, on_sleep, tag)
    entry = _owned.template(tag, on_sleep, device, has_file=True)
    shards = _shards(read_checkpoint(path_or_dir))
    runtime = _runtime.current()
    _refuse_capture(runtime, entry.device)
    segments: list[OwnedSegment | None] = []
    addresses: list[int] = []  # told to others until the first contents are there
    with ExitStack() as awake:
        try:
            operation = f"load_file({str(path_or_dir)!r})"
            with translated(operation, _LEFT, _owned.kind(runtime), changed=_LEFT):
                for shard in shards:
                    segments.append(_reserve(runtime, entry, shard, addresses, pin=pin_file))
                _make_room(runtime, entry.device, sum(shard.bytes for shard in shards))
                # Until there are tensors: of sleeping memory none could be made.
                awake.enter_context(_owned.writing(entry.tag, entry.device))
                _fill(runtime, addresses, sum(shard.bytes for shard in shards))
            tensors = _tensors(shards, segments, entry, runtime)
        except BaseException:
            segments.clear()  # the error's trace holds on to this frame
            raise
        finally:
            _loading.forget(addresses)
        _registry.tag_state(tag)
        if entry.on_sleep is OnSleep.RELOAD:
            _note_reloadable(tensors, segments)
    return tensors


def _check_pin(pin_file: object, on_sleep: OnSleep | str | None, tag: str) -> None:
    if type(pin_file) is not bool:
        raise TypeError(f"pin_file must be a bool, not {type(pin_file).__name__}")
    if pin_file and OnSleep.of(on_sleep, tag) is not OnSleep.RELOAD:
        raise ValueError('pin_file=True needs on_sleep="reload": nothing else reads the file again')


def _refuse_capture(runtime: Runtime, device: int) -> None:
    """Nothing can be read then, and what was reserved could not be given back."""
    if runtime.backend.is_capturing() or runtime.allocator.capturing(device):
        raise BusyError(
            f"load_file: a CUDA graph capture is under way on {runtime.device_name(device)}. "
            "Nothing was loaded; end the capture and repeat the call."
        )


@dataclass
class _Shard:
    """One file, and where its bytes go in its segment."""

    header: Header
    offsets: dict[str, int] = field(default_factory=dict)
    parts: list[tuple[int, int, int]] = field(default_factory=list)  # segment, file, bytes
    bytes: int = 0

    def add(self, entry: TensorEntry) -> None:
        """Puts a tensor behind the last one; runs without a gap are one part."""
        if not entry.bytes:
            self.offsets[entry.name] = 0
            return
        at = -(-self.bytes // _ALIGNMENT) * _ALIGNMENT
        self.offsets[entry.name] = at
        if self.parts and at == self.bytes:
            start, offset, _ = self.parts[-1]
            self.parts[-1] = (start, offset, at + entry.bytes - start)
        else:
            self.parts.append((at, entry.begin, entry.bytes))
        self.bytes = at + entry.bytes


def _shards(checkpoint: Checkpoint) -> list[_Shard]:
    unknown = [entry for entry in checkpoint.tensors.values() if torch_dtype(entry) is None]
    if unknown:
        types = choices({entry.dtype for entry in unknown})
        raise fault(
            checkpoint.path,
            f"this torch has no type for {types}, as {unknown[0].name!r} is; "
            f"{len(unknown)} tensor(s) in all",
        )
    shards = [_Shard(header) for header in checkpoint.files]
    for shard in shards:
        for entry in shard.header.tensors.values():
            shard.add(entry)
    return shards


def _reserve(
    runtime: Runtime, entry: PoolEntry, shard: _Shard, addresses: list[int], *, pin: bool
) -> OwnedSegment | None:
    """A sleeping segment for the file, noted in ``addresses``; None for one without bytes."""
    if not shard.bytes:
        return None
    file = held_file(shard.header)

    def make() -> OwnedSegment:
        owner = _C.Owner(entry.tag, entry.on_sleep.value)
        reload = entry.on_sleep is OnSleep.RELOAD
        memory = _C.Memory.from_file(
            *(runtime.allocator, shard.bytes, entry.device, owner),
            *(file, shard.parts, reload, pin),
        )
        return OwnedSegment(runtime, entry, memory)

    segment = _loading.reserve(make)
    addresses.append(segment.address)
    return segment


def _make_room(runtime: Runtime, device: int, wanted: int) -> None:
    if runtime.allocator.device_info(device).free_bytes < wanted:
        _snapshot.empty_cache(runtime)  # not possible any more when the tag is busy


def _fill(runtime: Runtime, addresses: list[int], wanted: int) -> None:
    """Reads every file: all of them, or nothing is mapped."""
    before = runtime.allocator.file_bytes()
    with shown(wanted, lambda: runtime.allocator.file_bytes() - before):
        runtime.allocator.wake(addresses, fill=None, verify=False, progress=None)


def _tensors(
    shards: list[_Shard],
    segments: list[OwnedSegment | None],
    entry: PoolEntry,
    runtime: Runtime,
) -> dict[str, torch.Tensor]:
    tensors = {}
    for shard, segment in zip(shards, segments, strict=True):
        for name, item in shard.header.tensors.items():
            dtype, shape = torch_dtype(item), torch_shape(item)
            assert dtype is not None  # others were refused
            if segment is None:
                where = torch.device(runtime.backend.device_type, entry.device)
                tensors[name] = torch.empty(shape, dtype=dtype, device=where)
            else:
                tensors[name] = segment.tensor(dtype, shape, shard.offsets[name])
    return tensors


def _note_reloadable(tensors: dict[str, torch.Tensor], segments: list[OwnedSegment | None]) -> None:
    """The file is the first backup; only a declaration to the contrary ends that."""
    _declared.mark_clean(tensors)
    places = [(segment.address, segment.bytes) for segment in segments if segment is not None]
    _declared.note_backup(places)
