"""How does a hosted model come to life, sleep and wake? Everything here may block.

Each model has tags of its own: what ``build_fn`` makes is ``host/<name>/weights``, and
what it makes in scopes of tags that begin with ``host/<name>/`` belongs to it as well.
"""

from __future__ import annotations

import gc
import time
import traceback
from collections.abc import Callable, Collection, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch

from cumem import _registry, _runtime
from cumem._devices import device_index
from cumem._text import size
from cumem.errors import BusyError, DeviceOutOfMemoryError
from cumem.inspection import tag_of
from cumem.loading import load_into
from cumem.memory import trim
from cumem.pool import use_memory_pool
from cumem.serving._schedule import Room
from cumem.sleep import sleep, wake_up
from cumem.switching import switch

_T = TypeVar("_T")

BuildFn = Callable[[], Any]

_FIRST_PAUSE = 0.002  # seconds between two tries while a graph is captured; then doubled


@dataclass(frozen=True)
class Recipe:
    """How a model is made: ``build_fn`` gives it memory, ``checkpoint`` its contents."""

    name: str
    build_fn: BuildFn
    checkpoint: Path | None = None


def tag_for(name: str, part: str = "weights") -> str:
    """The tag of a part of a model."""
    return f"host/{name}/{part}"


def tags_of(names: Collection[str]) -> list[str]:
    """Known tags of these models."""
    fronts = tuple(tag_for(name, "") for name in names)
    return sorted(tag for tag in _registry.known_tags() if tag.startswith(fronts))


def measure(name: str) -> tuple[int, int]:
    """Bytes that a model takes awake, and bytes that it takes now."""
    runtime = _runtime.if_started()
    segments = runtime.allocator.segments() if runtime is not None else []
    own = [info for info in segments if info.owner.tag.startswith(tag_for(name, ""))]
    return sum(info.bytes for info in own), sum(info.mapped_bytes for info in own)


class Mover:
    """Carries out what the schedule decides, one thing at a time.

    Attributes:
        device: ordinal of the device of all models.
        busy_seconds: how long a move waits for a graph capture to end.
    """

    def __init__(self, device: torch.device | str | int | None, busy_seconds: float) -> None:
        self._runtime = _runtime.current()
        self.device = device_index(device, self._runtime)
        self.busy_seconds = busy_seconds

    def exchange(self, leaving: Sequence[str], arriving: Sequence[str]) -> None:
        """Puts models to sleep and wakes others, in one operation.

        Raises:
            As :func:`cumem.switch`; BusyError when a capture goes on too long.
        """
        out, back = tags_of(leaving), tags_of(arriving)
        if out and back:
            self._patiently(lambda: switch(sleep_tags=out, wake_tags=back))
        elif out:
            self._patiently(lambda: sleep(tags=out))
        elif back:
            self._patiently(lambda: wake_up(back))

    def build(self, recipe: Recipe, leaving: Sequence[str], room: Room) -> Any:
        """Makes a model where others have made room; after a failure all is as before.

        One that is larger than expected, and fits only without others that are still
        awake, is put to sleep again.

        Args:
            recipe: the model.
            leaving: models that go to sleep for it.
            room: what it may take.

        Raises:
            DeviceOutOfMemoryError: it does not fit. ValueError: it has no memory in the
                pool, or some outside of it. Whatever ``build_fn`` raises.
        """
        self.exchange(leaving, ())
        model: Any = None
        try:
            model = self._build(recipe, room.most)
            if measure(recipe.name)[0] > room.now:
                self.exchange([recipe.name], ())
            return model
        except BaseException as error:
            model = None
            _let_go(error)
            self.give_up(recipe.name)
            self.exchange((), leaving)
            raise

    def give_up(self, name: str) -> None:
        """Gives back what nothing uses of a model that is gone."""
        gc.collect()
        for tag in tags_of([name]):
            trim(tag)

    def _build(self, recipe: Recipe, limit: int) -> Any:
        try:
            with self._on_device(), use_memory_pool(tag_for(recipe.name), device=self.device):
                model = recipe.build_fn()
                _check(recipe, model, limit)
            if recipe.checkpoint is not None:
                load_into(model, recipe.checkpoint)
        except torch.OutOfMemoryError as error:
            if isinstance(error, DeviceOutOfMemoryError):
                raise
            taken, _ = measure(recipe.name)
            raise DeviceOutOfMemoryError(
                f"model {recipe.name!r} does not fit: its build_fn ran out of device memory after "
                f"{size(taken)} ({error}). Nothing was changed; free memory, or lower the budget."
            ) from error
        return model

    def _on_device(self) -> AbstractContextManager[object]:
        return nullcontext() if self._runtime.emulated else torch.cuda.device(self.device)

    def _patiently(self, move: Callable[[], _T]) -> _T:
        """A capture of another model's is short, so the move waits for its end."""
        deadline, pause = time.monotonic() + self.busy_seconds, _FIRST_PAUSE
        while True:
            try:
                return move()
            except BusyError:
                if time.monotonic() + pause > deadline:
                    raise
            time.sleep(pause)
            pause *= 2


def _let_go(error: BaseException | None) -> None:
    """Empties the frames that an error holds: they hold what was built."""
    while error is not None:
        traceback.clear_frames(error.__traceback__)
        error = error.__cause__ or error.__context__


def _check(recipe: Recipe, model: object, limit: int) -> None:
    name = recipe.name
    taken, _ = measure(name)
    if not taken:
        raise ValueError(
            f"build_fn of model {name!r} made nothing on the device in its own thread, so there "
            "is nothing that could sleep"
        )
    if taken > limit:
        raise DeviceOutOfMemoryError(
            f"model {name!r} does not fit: its build_fn took {size(taken)}, and the host can give "
            f"it {size(limit)}. Nothing was changed; give the host a larger budget, or pin less."
        )
    if isinstance(model, torch.nn.Module):
        _refuse_outsiders(name, model)
    elif recipe.checkpoint is not None:
        kind = type(model).__name__
        raise TypeError(f"a checkpoint needs a build_fn that returns a module, not a {kind}")


def _refuse_outsiders(name: str, model: torch.nn.Module) -> None:
    tensors = [*model.named_parameters(), *model.named_buffers()]
    front = tag_for(name, "")
    outside = [
        key
        for key, tensor in tensors
        if tensor.numel() and not (tag_of(tensor) or "").startswith(front)
    ]
    if outside:
        shown = ", ".join(outside[:10])
        raise ValueError(
            f"{len(outside)} tensor(s) of model {name!r} are outside of its pools and would not "
            f"sleep: {shown}; build them on the device, in the thread that calls build_fn"
        )
