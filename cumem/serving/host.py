"""How do several models share one device, when not all of them fit?

A host keeps them under a budget of device memory. Who wants a model waits until it is
awake; models that nobody uses go to sleep for it, and never one in use.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import torch

from cumem._arguments import flag, instance, positive, shown
from cumem._text import choices
from cumem.errors import BusyError, CumemError
from cumem.loading import read_checkpoint
from cumem.serving._attendant import Attendant
from cumem.serving._closing import ClosedAtExit
from cumem.serving._moves import BuildFn, Mover, Recipe, tag_for
from cumem.serving._schedule import Resident, Schedule
from cumem.serving._status import HostStatus, ModelStatus

__all__ = ["HostStatus", "ModelHost", "ModelStatus"]


class ModelHost(ClosedAtExit):
    """Models under a budget of device memory, in one process and on one device.

    For one event loop; call it from nowhere else. What takes time is done in a thread.

    Args:
        budget_bytes: device memory for all models together. What they need while they
            run, and what is not theirs, must have room beside it.
        device: a device, its index, or None for the current one.
        patience: how often a use may be overtaken by later ones of higher priority, or
            of a model that happens to be there, before it goes first.
        busy_seconds: how long a move waits for the end of a graph capture.

    Raises:
        ValueError: a budget or patience that is not positive, a wait that is negative, or
            no such device. TypeError: a wrong type.
        DriverError: no usable driver.
    """

    def __init__(
        self,
        budget_bytes: int,
        *,
        device: torch.device | str | int | None = None,
        patience: int = 8,
        busy_seconds: float = 10.0,
    ) -> None:
        positive("budget_bytes", budget_bytes)
        positive("patience", patience)
        instance("busy_seconds", busy_seconds, (int, float), "a number of seconds")
        if not 0 <= busy_seconds < float("inf"):
            raise ValueError(f"busy_seconds must be 0 or more and finite, not {busy_seconds}")
        self._schedule = Schedule(budget_bytes, patience)
        self._attendant = Attendant(self._schedule, Mover(device, busy_seconds))
        self._closed = False

    def add(
        self,
        name: str,
        build_fn: BuildFn,
        checkpoint: str | Path | None = None,
        *,
        bytes: int | None = None,
        priority: int = 0,
        pinned: bool = False,
    ) -> None:
        """Makes a model known; it is built at its first use.

        ``build_fn()`` is called in the host's thread, in a scope of ``host/<name>/weights``.
        Memory with another fate goes into a scope of its own:
        ``use_memory_pool(host.tag(name, "kv_cache"), on_sleep="discard")``.

        Args:
            name: without a slash.
            build_fn: makes the model on the device and returns it.
            checkpoint: safetensors to copy into the module that build_fn returns.
            bytes: what the model will take; None: as much as the checkpoint has. Where
                neither says so, every idle model sleeps while it is built.
            priority: the higher, the earlier; a use may have one of its own.
            pinned: once awake it never goes to sleep.

        Raises:
            ValueError: a name that is taken or empty, or bytes below one. TypeError: a
                wrong type.
            CheckpointError: a faulty checkpoint.
            DeviceOutOfMemoryError: more bytes than the budget. Nothing is added.
        """
        self._refuse_closed()
        instance("name", name, str, "a string")
        if not name or "/" in name or name in self._schedule.models:
            raise ValueError(f"a model must have a name of its own without slash, not {name!r}")
        if not callable(build_fn):
            raise TypeError(f"build_fn must be a function without arguments, not {shown(build_fn)}")
        if checkpoint is not None:
            instance("checkpoint", checkpoint, (str, Path), "a path or None")
        if bytes is not None:
            positive("bytes", bytes)
        instance("priority", priority, int, "an int")
        flag("pinned", pinned)
        path = None if checkpoint is None else Path(checkpoint)
        if path is not None:
            tensors = read_checkpoint(path).tensors.values()
            bytes = bytes or sum(tensor.bytes for tensor in tensors)
        model = Resident(name, priority, pinned, bytes)
        self._schedule.step_for(model)  # raises when it can never fit
        self._schedule.models[name] = model
        self._attendant.recipes[name] = Recipe(name, build_fn, path)

    @staticmethod
    def tag(name: str, part: str = "weights") -> str:
        """The tag of a part of a model."""
        instance("name", name, str, "a string")
        return tag_for(name, part)

    @asynccontextmanager
    async def use(self, name: str, *, priority: int | None = None) -> AsyncIterator[Any]:
        """Waits until a model is awake and yields it; it stays so within the block.

        Args:
            name: a model that was added.
            priority: of this use; None: the model's.

        Raises:
            ValueError: an unknown name. TypeError: a wrong type.
            DeviceOutOfMemoryError: it cannot fit, or others than the host's models have
                the memory; nothing is lost, and a later use tries again.
            HostOutOfMemoryError, DriverError, BusyError: a move failed, likewise.
            Whatever build_fn raises; the model is as it was before.
        """
        self._refuse_closed()
        resident = self._known(name)
        if priority is not None:
            instance("priority", priority, int, "an int or None")
        wanted = resident.priority if priority is None else priority
        model = await self._attendant.acquire(resident, wanted)
        try:
            yield model
        finally:
            del model  # it must not outlive its removal here
            self._attendant.release(resident)

    def prewake(self, name: str) -> None:
        """Hints that a model will be wanted: it wakes when nobody has to wait for that.

        Uses that wait go first, and models in use are left alone. A hint that is not
        followed yet is followed later; a use of the model ends it.

        Raises:
            ValueError: an unknown name.
        """
        self._refuse_closed()
        model = self._known(name)
        if not model.is_awake and model not in self._schedule.hints:
            self._schedule.hints.append(model)
        self._attendant.dispatch()

    async def remove(self, name: str) -> None:
        """Forgets a model; its memory goes back when nothing else holds the model.

        Raises:
            ValueError: an unknown name. BusyError: it is in use, or somebody waits.
        """
        model = self._known(name)
        await self._attendant.quiet()
        if self._known(name) is not model:
            return  # it went, and another came, while this call waited
        if model.users or any(waiter.model is model for waiter in self._schedule.waiting):
            raise BusyError(f"model {name!r} is in use. Nothing was removed.")
        await self._attendant.forget(model)

    async def close(self) -> None:
        """Ends the host: who waits is refused, and its models are forgotten.

        Raises:
            BusyError: a model is in use; the others are gone. Call it again.
        """
        self._closed = True
        self._attendant.refuse_all(CumemError("the model host was closed"))
        await self._attendant.quiet()
        in_use = [model.name for model in self._schedule.models.values() if model.users]
        for name in self._schedule.models.keys() - set(in_use):
            if name in self._schedule.models:  # else another task has removed it meanwhile
                await self.remove(name)
        if in_use:
            raise BusyError(f"models are in use: {choices(in_use)}. They were not removed.")
        self._attendant.shutdown()

    def status(self) -> HostStatus:
        """What there is now."""
        models = self._schedule.models.values()
        return HostStatus(
            budget_bytes=self._schedule.budget_bytes,
            mapped_bytes=sum(model.mapped_bytes for model in models),
            hits=self._attendant.hits,
            moves=self._attendant.moves,
            failures=self._attendant.failures,
            move_seconds=self._attendant.seconds,
            models=tuple(self._status_of(model) for model in models),
        )

    def _status_of(self, model: Resident) -> ModelStatus:
        return ModelStatus(
            name=model.name,
            state=model.state,
            bytes=model.bytes,
            mapped_bytes=model.mapped_bytes,
            users=model.users,
            waiting=sum(waiter.model is model for waiter in self._schedule.waiting),
            priority=model.priority,
            pinned=model.pinned,
        )

    def _known(self, name: str) -> Resident:
        instance("name", name, str, "a string")
        try:
            return self._schedule.models[name]
        except KeyError:
            known = choices(self._schedule.models)
            raise ValueError(f"unknown model {name!r}; known models: {known}") from None

    def _refuse_closed(self) -> None:
        if self._closed:
            raise CumemError("the model host was closed")
