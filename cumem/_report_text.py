"""How does a memory report look to people?"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from cumem._text import amount, size, table

if TYPE_CHECKING:
    from cumem.reporting import BlockReport, DeviceReport, TagReport

_NAMED = 10  # intruders of a tag


def device_lines(device: DeviceReport) -> Iterator[str]:
    yield (
        f"{device.device}: {size(device.used_bytes)} of {size(device.total_bytes)} in use: "
        f"{size(device.mapped_bytes)} mapped by cumem, {size(device.torch_bytes)} reserved by "
        f"torch outside of pools, {size(device.other_bytes)} contexts and other processes"
    )
    for process in device.processes:
        yield f"  process {process.pid}: {amount(process.bytes)}"
    if device.tags:
        yield from (f"  {line}" for line in table(_rows(device)).splitlines())
    for tag in device.tags:
        yield from _tag_lines(tag)


def _rows(device: DeviceReport) -> list[list[str]]:
    head = ["tag", "on sleep", "segments", "bytes", "live", "holes", "mapped", "asleep", "backups"]
    rows = [
        [tag.tag, "/".join(tag.on_sleep), str(tag.segments)]
        + [
            size(count)
            for count in (
                *(tag.segment_bytes, tag.live_bytes, tag.hole_bytes),
                *(tag.mapped_bytes, tag.asleep_bytes, tag.backup_bytes),
            )
        ]
        for tag in device.tags
    ]
    return [head, *rows]


def _tag_lines(tag: TagReport) -> Iterator[str]:
    if tag.largest:
        yield f"  largest blocks of {tag.tag!r}:"
        yield from (line for block in tag.largest for line in _block_lines(block))
    if tag.intruders:
        total = sum(block.bytes for block in tag.intruders)
        yield (
            f"  {tag.tag!r} is discarded by a sleep, and so are these {len(tag.intruders)} small "
            f"block(s) of {size(total)} in it, unless you cumem.keep() them:"
        )
        yield from (line for block in tag.intruders[:_NAMED] for line in _block_lines(block))
        if len(tag.intruders) > _NAMED:
            yield f"    and {len(tag.intruders) - _NAMED} more"


def _block_lines(block: BlockReport) -> Iterator[str]:
    held = f"  {', '.join(block.tensors)}" if block.tensors else ""
    yield f"    {size(block.bytes)} at {block.address:#x}{held}"
    yield from (f"      {frame}" for frame in block.stack)
