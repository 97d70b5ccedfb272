"""What does a model host say of itself?"""

from __future__ import annotations

from dataclasses import dataclass

from cumem._text import size
from cumem.serving._schedule import ModelState


@dataclass(frozen=True)
class ModelStatus:
    """One model of a host; sizes in bytes.

    Attributes:
        state: ``new`` (not built yet), ``asleep``, ``awake`` or ``moving``.
        bytes: what it takes awake; 0 before it is built.
        mapped_bytes: what it takes now.
        users: who has it now.
        waiting: who waits for it.
    """

    name: str
    state: ModelState
    bytes: int
    mapped_bytes: int
    users: int
    waiting: int
    priority: int
    pinned: bool


@dataclass(frozen=True)
class HostStatus:
    """A host and its models.

    Attributes:
        hits: uses that found their model awake.
        moves: switches, wakes and builds that were carried out.
        failures: those that failed.
        move_seconds: time that all of them took.
    """

    budget_bytes: int
    mapped_bytes: int
    hits: int
    moves: int
    failures: int
    move_seconds: float
    models: tuple[ModelStatus, ...]

    def __str__(self) -> str:
        lines = [
            f"host: {size(self.mapped_bytes)} of {size(self.budget_bytes)}, {self.hits} hits, "
            f"{self.moves} moves in {self.move_seconds:.3f} s, {self.failures} failed"
        ]
        lines += [
            f"{model.name}: {model.state.value}, {size(model.bytes)}, {model.users} using, "
            f"{model.waiting} waiting"
            for model in self.models
        ]
        return "\n".join(lines)
