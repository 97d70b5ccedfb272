"""Which work buffers may share memory, and who proves that they do not disturb each other?

An engine knows at which step of its work each buffer is first written and last read.
Buffers whose lifetimes do not meet may lie at the same place. The plan finds places,
proves that no two buffers that live at once overlap, and in debug mode makes a use
outside of a lifetime visible.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence

import torch

from cumem import _owned, inspection
from cumem._arguments import flag, instance, shown
from cumem._devices import DeviceLike
from cumem._placing import Buffer, aligned, end, placed, prove
from cumem._text import size, table
from cumem.errors import AsleepError, CumemError
from cumem.options import OnSleep
from cumem.sleep import epoch

_POISON = 0xFF  # as wake_up(fill="poison"): NaN as a float, -1 as an integer


class BufferPlan:
    """Named work buffers with lifetimes, and how much memory they need together.

    Add all buffers, look at the numbers, then :meth:`allocate` once::

        plan = cumem.BufferPlan()
        plan.add("scores", (512, 512, 32), torch.bfloat16, first=2, last=3)
        plan.add("logits", (512, 128256), torch.bfloat16, first=9, last=9)
        buffers = plan.allocate()
        buffers["scores"]  # a tensor
    """

    def __init__(self) -> None:
        self._buffers: dict[str, Buffer] = {}

    def add(
        self,
        name: str,
        shape: int | Sequence[int],
        dtype: torch.dtype = torch.uint8,
        *,
        first: int,
        last: int,
    ) -> Buffer:
        """Adds a buffer that lives from step ``first`` to step ``last``, both included.

        Args:
            name: any string that no other buffer has.
            shape: lengths in elements; one number of bytes where ``dtype`` is not given.
            dtype: of the elements.
            first: the step at which it is first written.
            last: the step at which it is last read.

        Raises:
            ValueError: a name twice, a negative length, no bytes, or ``last < first``.
            TypeError: a wrong type. Nothing was added.
        """
        instance("name", name, str, "a string")
        if not isinstance(shape, (int, Iterable)):
            raise TypeError(f"shape of buffer {name!r} must be ints, not {shown(shape)}")
        lengths = (shape,) if isinstance(shape, int) else tuple(shape)
        instance("dtype", dtype, torch.dtype, "a torch.dtype")
        _check_numbers(name, lengths, (first, last))
        buffer = Buffer(name, dtype, lengths, first, last)
        if name in self._buffers:
            raise ValueError(f"there is a buffer {name!r} already")
        if min(lengths, default=1) < 0 or buffer.bytes == 0:
            raise ValueError(f"buffer {name!r} of shape {list(lengths)} has no bytes")
        if last < first:
            raise ValueError(f"buffer {name!r} ends at step {last}, before it begins at {first}")
        self._buffers[name] = buffer
        return buffer

    @property
    def buffers(self) -> tuple[Buffer, ...]:
        """In the order in which they were added."""
        return tuple(self._buffers.values())

    @property
    def payload_bytes(self) -> int:
        """What all buffers hold, to the byte."""
        return sum(buffer.bytes for buffer in self.buffers)

    @property
    def unshared_bytes(self) -> int:
        """Memory if each had its own, aligned to 512 bytes."""
        return sum(aligned(buffer.bytes) for buffer in self.buffers)

    @property
    def bytes(self) -> int:
        """Memory with sharing: where the last one of :meth:`offsets` ends, aligned."""
        return end(self.buffers, self.offsets())

    @property
    def least_bytes(self) -> int:
        """What no placement can go below: the most that lives at one step, aligned."""
        steps = {buffer.first for buffer in self.buffers}
        return max((self._live_bytes(step) for step in steps), default=0)

    def offsets(self, *, share: bool = True) -> dict[str, int]:
        """Where each buffer begins, in bytes: multiples of 512, the same for the same plan.

        Args:
            share: False gives each its own memory.

        Raises:
            CumemError: two buffers that live at once would overlap (an error of ours).
            TypeError: ``share`` is neither True nor False.
        """
        if flag("share", share):
            offsets = placed(self.buffers)
        else:
            offsets, at = {}, 0
            for buffer in self.buffers:
                offsets[buffer.name] = at
                at += aligned(buffer.bytes)
        prove(self.buffers, offsets)
        return {name: offsets[name] for name in self._buffers}

    def allocate(
        self,
        *,
        tag: str = "workspace",
        on_sleep: OnSleep | str | None = None,
        device: DeviceLike = None,
        share: bool = True,
        debug: bool = False,
    ) -> Buffers:
        """Takes memory for all of it, once, in one segment of ``tag``.

        Args:
            tag: the name of the memory.
            on_sleep: what a sleep does with it. Default: discard for ``workspace``.
            device: a device, its index, or None for the current one.
            share: False gives each buffer its own memory.
            debug: each buffer has its own memory, :meth:`Buffers.step` poisons what
                does not live and finds what was written there.

        Raises:
            ValueError: an empty plan, an empty tag, an unknown policy, no such device.
            TypeError: a wrong type.
            DeviceOutOfMemoryError: no room. DriverError: the driver refused.
            AsleepError: another thread put the tag to sleep meanwhile.
            Nothing was allocated.
        """
        if not self._buffers:
            raise ValueError("the plan has no buffers")
        offsets = self.offsets(share=flag("share", share) and not flag("debug", debug))
        segment = _owned.allocate(
            end(self.buffers, offsets), tag=tag, on_sleep=on_sleep, device=device
        )
        return Buffers(segment, self.buffers, offsets, debug=debug)

    def __str__(self) -> str:
        offsets = self.offsets()
        rows = [["buffer", "bytes", "steps", "offset"]]
        rows += [
            [buffer.name, str(buffer.bytes), f"{buffer.first}-{buffer.last}", str(offsets[name])]
            for name, buffer in self._buffers.items()
        ]
        total = f"{size(self.bytes)} with sharing, {size(self.unshared_bytes)} without"
        return f"{table(rows)}\n{total}"

    def _live_bytes(self, step: int) -> int:
        return sum(aligned(buffer.bytes) for buffer in self.buffers if buffer.lives_at(step))


class Buffers(Mapping[str, torch.Tensor]):
    """The tensors of a plan, by name; :meth:`BufferPlan.allocate` makes them.

    Contents are undefined before a buffer is written and outside of its lifetime. The
    memory goes when this object and the tensors over it are gone.

    Attributes:
        bytes: of the memory behind them.
        tag: its tag.
        debug: are lifetimes watched?
    """

    def __init__(
        self,
        segment: _owned.OwnedSegment,
        buffers: Sequence[Buffer],
        offsets: Mapping[str, int],
        *,
        debug: bool,
    ) -> None:
        self._plan = {buffer.name: buffer for buffer in buffers}
        self._tensors = {
            buffer.name: segment.tensor(buffer.dtype, buffer.shape, offsets[buffer.name])
            for buffer in buffers
        }
        self.bytes = segment.bytes
        self.tag = segment.tag
        self.debug = debug
        self._step: int | None = None
        self._epoch = epoch(self.tag)
        if debug:
            self._poison(self._plan)

    def __getitem__(self, name: str) -> torch.Tensor:
        return self._tensors[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._tensors)

    def __len__(self) -> int:
        return len(self._tensors)

    def step(self, number: int) -> None:
        """Says that step ``number`` begins; without debug it does nothing.

        In debug mode whatever does not live at this step is filled with poison (0xFF
        bytes: NaN, -1), so that a read outside of a lifetime is seen; and what did not
        live until now must still hold the poison. Waits for the device.

        Raises:
            CumemError: a buffer was written outside of its lifetime; all such are named.
            AsleepError: the memory is asleep. TypeError: not a number.
        """
        if isinstance(number, bool) or not isinstance(number, int):
            raise TypeError(f"a step must be an int, not {type(number).__name__}")
        if not self.debug:
            return
        if not all(inspection.is_mapped(tensor) for tensor in self._tensors.values()):
            raise AsleepError(
                f"step({number}): the buffers (tag {self.tag!r}) are asleep. Nothing was changed; "
                "call wake_up first."
            )
        discarded, self._epoch = self._epoch != epoch(self.tag), epoch(self.tag)
        dead = [name for name in self._plan if not self._lived(name)]
        written = [] if discarded else [name for name in dead if not self._is_poison(name)]
        before, self._step = self._step, number
        self._poison(name for name in self._plan if not self._lived(name))
        if written:
            names = ", ".join(repr(name) for name in written)
            when = "before the first step" if before is None else f"at step {before}"
            raise CumemError(
                f"step({number}): written outside of their lifetimes, {when}: {names}. "
                "What does not live is poisoned again; the others were not touched."
            )

    def _lived(self, name: str) -> bool:
        return self._step is not None and self._plan[name].lives_at(self._step)

    def _poison(self, names: Iterable[str]) -> None:
        for name in names:
            _raw(self._tensors[name]).fill_(_POISON)

    def _is_poison(self, name: str) -> bool:
        return bool((_raw(self._tensors[name]) == _POISON).all())


def _raw(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.view(-1).view(torch.uint8)


def _check_numbers(name: str, lengths: Sequence[object], steps: Sequence[object]) -> None:
    for what, numbers in (("lengths", lengths), ("steps", steps)):
        if not all(type(number) is int for number in numbers):
            raise TypeError(f"{what} of buffer {name!r} must be ints, not {list(numbers)}")
