"""Are all requests served, and none from sleeping memory, while an engine sleeps and wakes?

Clients send one request after the other; an operator puts the engine to sleep again and
again; requests wake it. A request reads weights and compares them with what they were.
"""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from workload import words_of

import cumem
from cumem.serving import Kind, ServingOptions, SleepController

_READ_WORDS = 1 << 13  # of one tensor, for each request


@dataclass(frozen=True)
class LoadSettings:
    """How much is asked of the controller."""

    requests: int = 1000
    clients: int = 64
    cycles: int = 50


@dataclass(frozen=True)
class Served:
    """One request: when it came, when its work began and ended, in seconds of one clock.

    Attributes:
        waited: memory was asleep, or on its way, at some time in between.
        right: the weights were what they had been.
    """

    number: int
    came: float
    began: float
    ended: float
    waited: bool
    right: bool


@dataclass
class Outcome:
    """What happened; ``faults`` is empty when all went well."""

    served: list[Served] = field(default_factory=list)
    faults: list[str] = field(default_factory=list)
    sleeps: list[float] = field(default_factory=list)  # seconds of each
    wakes: list[float] = field(default_factory=list)
    seconds: float = 0.0


class Load:
    """One run on these tensors, which are in pools of tag ``weights``."""

    def __init__(self, tensors: Sequence[torch.Tensor], settings: LoadSettings) -> None:
        self._settings = settings
        self._parts = [words_of(tensor)[:_READ_WORDS] for tensor in tensors]
        self._right = [int(part.sum()) for part in self._parts]
        self._numbers = iter(range(settings.requests))
        self._outcome = Outcome()
        self._away: list[tuple[float, float]] = []  # when no request may run
        self._left_at = 0.0
        self._progress = asyncio.Event()  # a request was answered

    async def run(self) -> Outcome:
        """Sends every request; returns when all are answered and the last sleep is over."""
        options = ServingOptions(
            auto_wake=True, request_seconds=None, drain_seconds=None, history=10_000
        )
        started = time.perf_counter()
        async with SleepController(options=options) as controller:
            self._watch(controller)
            clients = [self._client(controller) for _ in range(self._settings.clients)]
            await asyncio.gather(self._operate(controller), *clients)
            await controller.wake_up()
            self._judge(controller)
        self._outcome.seconds = time.perf_counter() - started
        return self._outcome

    def _watch(self, controller: SleepController) -> None:
        """A witness beside the controller: what its hooks see."""

        def leaves() -> None:
            self._left_at = time.perf_counter()

        def is_back() -> None:
            self._away.append((self._left_at, time.perf_counter()))

        controller.before("sleep", leaves)
        controller.after("wake_up", is_back)

    async def _client(self, controller: SleepController) -> None:
        for number in self._numbers:
            came, sleeps = time.perf_counter(), len(controller.history)
            asleep = controller.state.value != "awake"
            try:
                async with controller.request() as request:
                    began = time.perf_counter()
                    right = await request.run(self._read, number)
                    ended = time.perf_counter()
            except cumem.CumemError as error:
                self._answer(f"request {number} was lost: {error}")
                continue
            waited = asleep or len(controller.history) > sleeps
            self._answer(Served(number, came, began, ended, waited, right))

    def _answer(self, answer: Served | str) -> None:
        if isinstance(answer, Served):
            self._outcome.served.append(answer)
        else:
            self._outcome.faults.append(answer)
        self._progress.set()

    def _read(self, number: int) -> bool:
        part = number % len(self._parts)
        if not cumem.is_mapped(self._parts[part]):
            return False
        return int(self._parts[part].sum()) == self._right[part]

    async def _operate(self, controller: SleepController) -> None:
        """A sleep after every so many requests, the same number before the first."""
        total, cycles = self._settings.requests, self._settings.cycles
        for cycle in range(1, cycles + 1):
            wanted = cycle * total // (cycles + 1)
            while self._answered() < wanted:
                self._progress.clear()
                await self._progress.wait()
            while not await _tried(controller):
                await controller.wake_up()  # joins the wake under way
            if self._answered() + controller.waiting >= total:
                await controller.wake_up()  # nobody is left who would

    def _answered(self) -> int:
        return len(self._outcome.served) + len(self._outcome.faults)

    def _judge(self, controller: SleepController) -> None:
        outcome, settings = self._outcome, self._settings
        for item in controller.history:
            into = outcome.sleeps if item.kind is Kind.SLEEP else outcome.wakes
            into.append(item.seconds)
            if item.error is not None:
                outcome.faults.append(f"a {item.kind.value} failed: {item.message}")
        numbers = sorted(item.number for item in outcome.served)
        if numbers != list(range(settings.requests)):
            outcome.faults.append(f"{settings.requests - len(numbers)} request(s) were lost")
        if len(outcome.sleeps) < settings.cycles or len(self._away) < settings.cycles:
            outcome.faults.append(f"only {len(self._away)} of {settings.cycles} cycles were made")
        outcome.faults += [
            f"request {item.number} read wrong bytes" for item in outcome.served if not item.right
        ]
        outcome.faults += [
            f"request {item.number} ran while memory slept"
            for item, (left, back) in itertools.product(outcome.served, self._away)
            if item.began < back and item.ended > left
        ]


async def _tried(controller: SleepController) -> bool:
    """Puts the engine to sleep; False: a wake was under way."""
    try:
        return bool((await controller.sleep()).tags)
    except cumem.BusyError:
        return False
