"""Which model is served next, and which ones make room for it?

Decisions only: nothing here touches memory or an event loop.

Note [Nobody starves]: waiters are served by priority, then by age. One that was overtaken
``patience`` times goes before everybody who was not. Models that make room for the first
waiter are given to nobody who ranks behind it, so that those in use become idle. When a
model has come, all who were waiting for it are served at once, because a switch costs
much more than a use; those who come later are not.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterable
from dataclasses import dataclass, field
from enum import Enum

from cumem._text import size
from cumem.errors import DeviceOutOfMemoryError


class ModelState(str, Enum):
    """Where a model is."""

    NEW = "new"  # not built yet
    ASLEEP = "asleep"
    AWAKE = "awake"
    MOVING = "moving"  # being built, put to sleep or woken


@dataclass(eq=False)
class Resident:
    """One model, as the schedule sees it.

    Attributes:
        expected_bytes: what it will take, as far as known before it is built.
        bytes: what it takes awake; known once it is built.
        mapped_bytes: what it takes now.
        users: who has it now; it does not sleep meanwhile.
        last_used: moment of the schedule's clock.
    """

    name: str
    priority: int = 0
    pinned: bool = False
    expected_bytes: int | None = None
    bytes: int = 0
    mapped_bytes: int = 0
    state: ModelState = ModelState.NEW
    users: int = 0
    last_used: int = 0

    @property
    def is_awake(self) -> bool:
        return self.state is ModelState.AWAKE


@dataclass(eq=False)
class Waiter:
    """Somebody who waits for a model.

    Attributes:
        ticket: order of arrival.
        overtaken: how often somebody who came later was served to its disadvantage.
    """

    model: Resident
    priority: int
    ticket: int = 0
    overtaken: int = 0


@dataclass(frozen=True)
class Step:
    """A model that is to come, and those that go to sleep for it."""

    model: Resident
    victims: tuple[Resident, ...] = ()

    @property
    def draining(self) -> frozenset[Resident]:
        """Victims that somebody still uses."""
        return frozenset(victim for victim in self.victims if victim.users)


@dataclass(frozen=True)
class Room:
    """What a model that is built may take; bytes.

    Attributes:
        now: beside everything that stays awake.
        most: beside what is pinned.
    """

    now: int
    most: int


@dataclass
class Schedule:
    """Models under a budget, and who waits for them.

    Attributes:
        budget_bytes: device memory that all models together may take.
        patience: how often a waiter may be overtaken.
    """

    budget_bytes: int
    patience: int
    models: dict[str, Resident] = field(default_factory=dict)
    waiting: list[Waiter] = field(default_factory=list)
    hints: list[Resident] = field(default_factory=list)
    _clock: itertools.count[int] = field(default_factory=lambda: itertools.count(1))

    def queue(self, model: Resident, priority: int) -> Waiter:
        waiter = Waiter(model, priority, next(self._clock))
        self.waiting.append(waiter)
        return waiter

    def touch(self, model: Resident) -> None:
        """Books a use, for the order in which models go to sleep."""
        model.last_used = next(self._clock)

    def servable(self) -> list[Waiter]:
        """Those whose model is awake and who may have it now, in their order."""
        head = self._head()
        step = self._step_or_none(head)
        leaving = step.victims if step is not None else ()
        return [
            waiter
            for waiter in sorted(self.waiting, key=self._rank)
            if waiter.model.is_awake
            and (waiter.model not in leaving or self._precedes(waiter, head))
        ]

    def serve(self, waiter: Waiter) -> None:
        """Gives a waiter its model, which is awake."""
        head = self._head()
        step = self._step_or_none(head)
        if step is not None and waiter.model in step.victims:
            self._overtake(head, waiter)
        self._give(waiter)

    def serve_arrived(self, model: Resident) -> list[Waiter]:
        """Gives a model that has just come to all who wait for it."""
        served = sorted((w for w in self.waiting if w.model is model), key=self._rank)
        if served:
            self._overtake(self._head(), max(served, key=lambda waiter: waiter.ticket))
        for waiter in served:
            self._give(waiter)
        return served

    def _give(self, waiter: Waiter) -> None:
        self.waiting.remove(waiter)
        waiter.model.users += 1
        self.touch(waiter.model)

    @staticmethod
    def _overtake(head: Waiter | None, served: Waiter) -> None:
        if head is not None and head.ticket < served.ticket:
            head.overtaken += 1

    def next_step(self) -> Step | None:
        """What to do next; None: nothing, or nothing before somebody is done.

        Raises:
            DeviceOutOfMemoryError: the first waiter's model can never fit.
        """
        head = self._head()
        if head is not None:
            step = self.step_for(head.model)
            return None if step.draining else step
        absent = (model for model in self.hints if not model.is_awake)
        return next((hinted for model in absent if (hinted := self._hinted(model))), None)

    def first_waiting(self) -> Resident | None:
        """The model that is to come next."""
        head = self._head()
        return head.model if head is not None else None

    def step_for(self, model: Resident) -> Step:
        """Who must make room for a model, the least recently used first.

        Raises:
            DeviceOutOfMemoryError: not even all that may sleep make room enough.
        """
        others = [other for other in self.models.values() if other is not model]
        may_go = [other for other in others if other.mapped_bytes and not other.pinned]
        pinned = sum(other.mapped_bytes for other in others if other.pinned)
        wanted = self._wanted(model)
        if wanted is None:  # not known before it is built: all there is
            wanted = self.budget_bytes - pinned
        if wanted > self.budget_bytes - pinned:
            raise self._too_large(model, wanted, others)
        missing = wanted - (self.budget_bytes - sum(other.mapped_bytes for other in others))
        return Step(model, _enough(may_go, missing))

    def room_beside(self, step: Step) -> Room:
        """What there is for the model of a step once its victims sleep."""
        others = [other for other in self.models.values() if other is not step.model]
        stay = sum(other.mapped_bytes for other in others if other not in step.victims)
        pinned = sum(other.mapped_bytes for other in others if other.pinned)
        return Room(self.budget_bytes - stay, self.budget_bytes - pinned)

    def _hinted(self, model: Resident) -> Step | None:
        """As :meth:`step_for`, where nobody has to wait for it."""
        try:
            step = self.step_for(model)
        except DeviceOutOfMemoryError:
            return None
        return None if step.draining else step

    def _head(self) -> Waiter | None:
        """The first of those whose model is not there."""
        absent = [waiter for waiter in self.waiting if not waiter.model.is_awake]
        return min(absent, key=self._rank, default=None)

    def _step_or_none(self, head: Waiter | None) -> Step | None:
        if head is None:
            return None
        try:
            return self.step_for(head.model)
        except DeviceOutOfMemoryError:
            return None  # next_step() tells the waiter

    def _rank(self, waiter: Waiter) -> tuple[int, int, int]:
        if waiter.overtaken >= self.patience:
            return (0, 0, waiter.ticket)
        return (1, -waiter.priority, waiter.ticket)

    def _precedes(self, waiter: Waiter, head: Waiter | None) -> bool:
        return head is None or self._rank(waiter) < self._rank(head)

    @staticmethod
    def _wanted(model: Resident) -> int | None:
        return model.expected_bytes if model.state is ModelState.NEW else model.bytes

    def _too_large(
        self, model: Resident, wanted: int, others: Iterable[Resident]
    ) -> DeviceOutOfMemoryError:
        pinned = [other for other in others if other.pinned and other.mapped_bytes]
        beside = ", ".join(f"{other.name!r} ({size(other.mapped_bytes)})" for other in pinned)
        why = f" beside what is pinned: {beside}" if pinned else ""
        return DeviceOutOfMemoryError(
            f"model {model.name!r} needs {size(wanted)}, and the budget is "
            f"{size(self.budget_bytes)}{why}. Nothing was changed; give the host a larger budget, "
            "or pin less."
        )


def _enough(models: Collection[Resident], missing: int) -> tuple[Resident, ...]:
    """As many as free ``missing`` bytes: idle ones first, then by age, and none too many."""
    ordered = sorted(models, key=lambda model: (model.users > 0, model.last_used))
    chosen: list[Resident] = []
    freed = 0
    for model in ordered:
        if freed >= missing:
            break
        chosen.append(model)
        freed += model.mapped_bytes
    for model in reversed(chosen[:-1]):  # a large one may have made a smaller one needless
        if freed - model.mapped_bytes >= missing:
            chosen.remove(model)
            freed -= model.mapped_bytes
    return tuple(chosen)
