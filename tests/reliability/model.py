"""What must be true of every tensor, tag and byte after any program of calls?

The model of the state machine: expected bytes per tensor, who is asleep, epochs.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import torch
from plain_memory import PlainMemory
from support import contents_of, fill_pattern, memory_at, outside_scopes, same_bytes

import cumem
from cumem.testing import EmulatedDriver

_DRIVER_H = Path(__file__).parents[2] / "csrc" / "core" / "driver.h"

# Every call that the core can make.
DRIVER_CALLS = sorted(
    set(re.findall(r"(?:REQUIRED|OPTIONAL)\((cu\w+)\)", _DRIVER_H.read_text()))
    - {"cuInit", "cuDriverGetVersion", "cuGetErrorName"}  # made once, or of no consequence
)

# Those of which every sleep or wake makes some.
CALLS_OF_A_MOVE = (
    *("cuMemUnmap", "cuMemRelease", "cuMemCreate", "cuMemMap", "cuMemSetAccess"),
    *("cuMemcpyDtoHAsync", "cuMemcpyHtoDAsync", "cuMemsetD8Async", "cuCtxSynchronize"),
    *("cuEventRecord", "cuEventSynchronize", "cuStreamSynchronize", "cuLaunchKernel"),
    *("cuMemHostRegister", "cuStreamCreate", "cuEventCreate", "cuCtxPushCurrent"),
)

CODES = (
    *("CUDA_ERROR_OUT_OF_MEMORY", "CUDA_ERROR_UNKNOWN", "CUDA_ERROR_INVALID_VALUE"),
    *("CUDA_ERROR_NOT_SUPPORTED", "CUDA_ERROR_NOT_PERMITTED", "CUDA_ERROR_INVALID_HANDLE"),
    *("CUDA_ERROR_ILLEGAL_ADDRESS", "CUDA_ERROR_LAUNCH_FAILED", "CUDA_ERROR_NOT_READY"),
)

# A refusal of one of these comes after the first unmap, so part of a sleep is done.
CANNOT_BE_UNDONE = ("cuMemUnmap", "cuMemRelease", "cuCtxPushCurrent")


class Fault(NamedTuple):
    """One driver call that fails once."""

    call: str
    nth: int
    code: str


@dataclass(eq=False)
class Held:
    """A live tensor and what is expected of it."""

    tensor: torch.Tensor
    tag: str
    policy: str
    graph: bool = False
    asleep: bool = False
    lost: bool = False  # its contents were discarded, and it sleeps
    kept: bool = False
    declared: bool = False
    contents: torch.Tensor | None = None  # None: undefined

    def __post_init__(self) -> None:
        self.address = self.tensor.data_ptr()

    def write(self, seed: int) -> None:
        if self.declared:
            cumem.mark_dirty(self.tensor)
            self.declared = False
        fill_pattern(self.tensor, seed)
        with outside_scopes():
            self.contents = contents_of(self.tensor, seed)

    def sleep(self, request: Request) -> bool:
        """Goes to sleep as asked for; says whether its contents are lost now."""
        self.asleep = True
        self.lost = request.policy_for(self) == "discard" and not self.kept
        if self.lost:
            self.contents = None
        return self.lost

    def wake(self, fill: str | None) -> None:
        self.asleep = False
        if self.lost and fill is not None:
            with outside_scopes():
                size = self.tensor.numel() * self.tensor.element_size()
                value = 0x00 if fill == "zero" else 0xFF
                self.contents = torch.full((size,), value, dtype=torch.uint8)
        self.lost = False

    def check(self) -> None:
        assert self.tensor.data_ptr() == self.address
        assert cumem.tag_of(self.tensor) == self.tag
        assert cumem.is_mapped(self.tensor) == (not self.asleep)
        if self.contents is not None and not self.asleep:
            with outside_scopes():
                assert same_bytes(self.tensor, self.contents)


class Request(NamedTuple):
    """The arguments of one sleep."""

    level: int
    tags: tuple[str, ...] | None
    offload_tags: tuple[str, ...] | None

    def call(self) -> cumem.SleepReport:
        return cumem.sleep(self.level, tags=self.tags, offload_tags=self.offload_tags)

    def plan(self) -> cumem.SleepPlan:
        return cumem.plan_sleep(self.level, tags=self.tags, offload_tags=self.offload_tags)

    def covers(self, tag: str) -> bool:
        return self.level > 0 and (self.tags is None or tag in self.tags)

    def policy_for(self, held: Held) -> str:
        if held.policy == "keep" or not self.covers(held.tag):
            return "keep"
        if self.offload_tags is not None:
            return "offload" if held.tag in self.offload_tags else "discard"
        return "discard" if self.level == 2 else held.policy

    def chosen(self, tensors: Iterable[Held]) -> list[Held]:
        """Those that will go to sleep."""
        return [held for held in tensors if not held.asleep and self.policy_for(held) != "keep"]


class Standing(NamedTuple):
    """What a call that changes nothing must leave alone; backups of the awake may go."""

    sleeping: frozenset[str]
    tags: tuple[tuple[object, ...], ...]
    physical_bytes: int
    reserved_addresses: int
    used_bytes: int

    @classmethod
    def now(cls, emulator: EmulatedDriver) -> Standing:
        stats = cumem.stats()
        tags = tuple(
            (tag.tag, tag.segments, tag.segment_bytes, tag.mapped_bytes, tag.live_bytes)
            for tag in stats.tags
            if tag.segments
        )
        return cls(
            cumem.sleeping_tags(),
            tags,
            stats.physical_bytes,
            stats.reserved_addresses,
            emulator.used_bytes(),
        )

    def no_more_than(self, before: Standing) -> bool:
        """Nothing was leaked: where memory waited to be given back, it may have gone meanwhile."""
        return (
            self.sleeping <= before.sleeping
            and self.physical_bytes <= before.physical_bytes
            and self.reserved_addresses <= before.reserved_addresses
            and self.used_bytes <= before.used_bytes
        )


class Tenant(PlainMemory):
    """Somebody else on the device, who writes to all that they have."""

    def dirty(self) -> None:
        with outside_scopes():
            for address, size in self.parts:
                memory_at(address, size).fill_(0xA5)


def check_stats(emulator: EmulatedDriver, *, refused: bool) -> None:
    """The equations over what the stats say; a refusal leaves memory that is nobody's."""
    stats = cumem.stats()
    for tag in stats.tags:
        assert tag.mapped_bytes + tag.asleep_bytes == tag.segment_bytes
        assert tag.live_bytes <= tag.segment_bytes
        assert tag.backup_bytes <= tag.segment_bytes
        assert tag.epoch == cumem.epoch(tag.tag)
    assert cumem.sleeping_tags() == {tag.tag for tag in stats.tags if tag.asleep_bytes}
    assert sum(tag.backup_bytes for tag in stats.tags) <= stats.host_used_bytes <= stats.host_bytes
    assert stats.handles_created >= stats.handles_released
    assert (stats.unknown_frees, stats.waiting_frees, stats.quarantined_segments) == (0, 0, 0)
    for device in stats.devices:
        assert device.mapped_bytes == stats.mapped_bytes
        assert device.mapped_bytes <= device.used_bytes == emulator.used_bytes()
    if refused:
        assert stats.physical_bytes >= stats.mapped_bytes
        assert stats.reserved_addresses >= stats.segment_bytes
    else:
        assert stats.refused_calls == 0
        assert stats.physical_bytes == stats.mapped_bytes
        assert stats.reserved_addresses == stats.segment_bytes


def count_lost(newly_lost: Collection[Held], epochs: Counter[str]) -> None:
    """One sleep moves the epoch of each tag that lost contents by one."""
    for tag in {held.tag for held in newly_lost}:
        epochs[tag] += 1
