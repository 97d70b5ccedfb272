"""In which states can a serving engine be, how is it configured, and what did it do?"""

from __future__ import annotations

from dataclasses import dataclass, fields
from enum import Enum
from typing import TypeVar

from cumem._text import choices
from cumem.reports import SleepReport, WakeReport

_E = TypeVar("_E", bound=Enum)


class State(str, Enum):
    """Where an engine is in its life cycle."""

    AWAKE = "awake"  # requests are served
    DRAINING = "draining"  # going to sleep: requests end first, then memory goes
    ASLEEP = "asleep"  # put to sleep, in whole or in part
    WAKING = "waking"
    PARTLY_AWAKE = "partly_awake"  # between the stages of a staged wake


class Kind(str, Enum):
    """The two transitions."""

    SLEEP = "sleep"
    WAKE_UP = "wake_up"


class Mode(str, Enum):
    """What becomes of requests in flight when a sleep begins."""

    WAIT = "wait"  # they run to their end
    ABORT = "abort"  # they are cancelled

    @classmethod
    def of(cls, value: Mode | str) -> Mode:
        """The mode that ``value`` names.

        Raises:
            ValueError: an unknown name. TypeError: not a string.
        """
        return _named(cls, value, "mode")


def kind_of(value: Kind | str) -> Kind:
    """The transition that ``value`` names; errors as for :meth:`Mode.of`."""
    return _named(Kind, value, "transition")


def _named(enum: type[_E], value: object, what: str) -> _E:
    if not isinstance(value, str):
        raise TypeError(f"{what} must be a string, not {type(value).__name__}")
    try:
        return enum(value)
    except ValueError:
        names = choices(str(member.value) for member in enum)
        raise ValueError(f"unknown {what} {value!r}; choices: {names}") from None


@dataclass(frozen=True, kw_only=True)
class ServingOptions:
    """How a controller works.

    Attributes:
        auto_wake: a request that finds the engine asleep wakes it and waits; False: it
            is refused.
        idle_seconds: the engine goes to sleep after this long without a request; None: never.
        idle_level: the level of that sleep.
        drain_seconds: a sleep that waits longer than this for requests to end is given
            up; None: no limit.
        request_seconds: a request that waits longer than this for a wake is refused;
            None: no limit. Time in which the engine is awake does not count.
        most_in_flight: so many requests run at once, and others wait for their turn, in
            order; None: no limit. One inside of another counts, and could wait for itself.
        most_waiting: a request that would have to wait, where so many do, is refused;
            None: no limit.
        history: how many past transitions are remembered.
    """

    auto_wake: bool = False
    idle_seconds: float | None = None
    idle_level: int = 1
    drain_seconds: float | None = 60.0
    request_seconds: float | None = 60.0
    most_in_flight: int | None = None
    most_waiting: int | None = None
    history: int = 64

    def __post_init__(self) -> None:
        if type(self.auto_wake) is not bool:
            raise TypeError(f"auto_wake must be bool, not {type(self.auto_wake).__name__}")
        if type(self.idle_level) is not int:
            raise TypeError(f"idle_level must be int, not {type(self.idle_level).__name__}")
        for field in fields(self):
            if field.name.endswith("_seconds"):
                check_seconds(field.name, getattr(self, field.name))
        if self.idle_level not in (1, 2):
            raise ValueError(f"idle_level must be 1 or 2, not {self.idle_level}")
        _at_least_one("history", self.history)
        for name in ("most_in_flight", "most_waiting"):
            if (most := getattr(self, name)) is not None:
                _at_least_one(name, most)


def _at_least_one(name: str, value: object) -> None:
    if type(value) is not int:
        raise TypeError(f"{name} must be int, not {type(value).__name__}")
    if value < 1:
        raise ValueError(f"{name} must be at least 1, not {value}")


def check_seconds(name: str, value: object) -> None:
    """Raises unless ``value`` is None or a positive number of seconds."""
    if value is None:
        return
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise TypeError(f"{name} must be a number or None, not {type(value).__name__}")
    if not 0 < value < float("inf"):
        raise ValueError(f"{name} must be positive and finite, not {value}")


@dataclass(frozen=True)
class Transition:
    """A transition that is over, well or not.

    Attributes:
        kind: which one.
        started: when it began, in seconds since 1970.
        drain_seconds: how long it waited for requests to end.
        seconds: how long hooks and memory took after that.
        state: the state that it led to.
        asleep: the tags that slept then.
        report: what was done; None where it failed.
        error: the kind of failure, such as ``DeviceOutOfMemoryError``; None where it went well.
        message: what the failure said.
    """

    kind: Kind
    started: float
    drain_seconds: float
    seconds: float
    state: State
    asleep: frozenset[str]
    report: SleepReport | WakeReport | None
    error: str | None = None
    message: str = ""
