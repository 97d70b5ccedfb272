"""How do segments of cumem's own grow and shrink where they are?"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from cumem import _caches, _operation, _owned, _runtime, waking
from cumem._owned import OwnedSegment
from cumem.errors import AsleepError, translated


def resize(segments: Sequence[OwnedSegment], bytes: int, settled: Callable[[], None]) -> None:
    """Gives each segment at least ``bytes``, in whole chunks; addresses stay.

    Growth is all or nothing. What shrinks is hidden first and then unmapped, after all
    work on the device; when the driver refuses, it stays hidden, and the same call goes on.

    Args:
        segments: of one tag, awake, with room reserved for ``bytes``.
        bytes: more than 0.
        settled: called when the sizes are exact, also after a failure, before any sleep
            can come in between. It must not call sleep or wake_up.

    Raises:
        AsleepError: they are asleep. BusyError: a graph capture is under way, or the
            call comes from inside a hook.
        DeviceOutOfMemoryError: no room, also after torch's caches were cleared.
        Nothing was changed by these.
        DriverError: the driver refused.
    """
    runtime = _runtime.current()
    tag = segments[0].tag
    operation = f"resize of tag {tag!r}"
    waking.join_pending()
    with _operation.exclusive(operation, [tag]):
        _operation.refuse_capture(operation, runtime)
        if not all(runtime.allocator.is_awake(part.address, part.bytes) for part in segments):
            raise AsleepError(f"{operation}: it is asleep. Nothing was changed; wake it first.")
        wanted = [(part.address, bytes) for part in segments]
        left = "No segment has grown; what was to go is not used, and the same call goes on."
        try:
            with translated(operation, left, _owned.kind(runtime)):
                _caches.with_cleared_caches(runtime, lambda: runtime.allocator.resize(wanted))
        finally:
            asked = {info.address: info.asked_bytes for info in runtime.allocator.segments()}
            for part in segments:
                part._bytes = asked[part.address]
            settled()
