"""Which calls does a random program make, and how are they made?

The part of the state machine that allocates, frees, and opens and leaves scopes.
"""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import torch
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    precondition,
    rule,
)
from model import (
    CALLS_OF_A_MOVE,
    CODES,
    DRIVER_CALLS,
    Fault,
    Held,
    Request,
    Standing,
    Tenant,
)
from support import GRANULE, MIB, make

import cumem
from cumem import _runtime
from cumem.testing import emulated_driver

CAPACITY = 128 * MIB
TAGS = ("weights", "kv_cache", "draft")
POLICIES = ("offload", "discard", "keep")
MOST_TENSORS = 9

tags = st.sampled_from(TAGS)
policies = st.sampled_from([*POLICIES, "offload"])
some_tags = st.none() | st.sets(tags).map(lambda chosen: tuple(sorted(chosen)))
sizes = st.one_of(
    st.integers(1, 5000),
    st.sampled_from([1, 511, 512, 513, 70_000, MIB, MIB + 1]),
    st.integers(1, 8 * MIB),
)
dtypes = st.sampled_from([torch.uint8, torch.float32, torch.bfloat16, torch.int64, torch.bool])
picks = st.integers(0, 1000)
faults = st.none() | st.builds(
    Fault, st.sampled_from(DRIVER_CALLS), st.integers(1, 4), st.sampled_from(CODES)
)
faults_of_a_move = st.builds(
    Fault, st.sampled_from(CALLS_OF_A_MOVE), st.sampled_from([1, 1, 2, 3]), st.sampled_from(CODES)
)
requests = st.builds(
    lambda level, chosen, offload: Request(1 if offload is not None else level, chosen, offload),
    st.sampled_from([1, 1, 1, 2, 0]),
    some_tags,
    st.none() | some_tags,
)
fills = st.sampled_from([None, "zero", "poison"])


def _options(where: tuple[bool, bool], **others: Any) -> cumem.Options:
    pinned, pageable = where
    return cumem.Options(pin_backups=pinned, allow_pageable=pageable, **others)


options = st.builds(
    _options,
    where=st.sampled_from([(True, True), (True, False), (False, True)]),
    chunk_bytes=st.sampled_from([GRANULE, 6 * MIB, 256 * MIB]),
    host_limit_bytes=st.sampled_from([None, None, MIB, 12 * MIB]),
    load_buffer_bytes=st.just(MIB // 4),
    load_ring_bytes=st.just(MIB),
    retain_backup=st.booleans(),
    clean_check=st.sampled_from(list(cumem.CleanCheck)),
    warn_empty_scope=st.just(False),
)

Answer = tuple[Any, Exception | None]


class Allocations(RuleBasedStateMachine):
    """One machine, its tensors, and what is expected of them."""

    @initialize()
    def start(self) -> None:
        self.stack = ExitStack()
        self.stack.enter_context(warnings.catch_warnings())
        # Refused frees are told by a warning; they are expected here.
        warnings.filterwarnings("ignore", "cumem: ", RuntimeWarning)
        self.options = cumem.Options(warn_empty_scope=False)
        cumem.configure(self.options)
        self.emulator = self.stack.enter_context(emulated_driver(capacity_bytes=CAPACITY))
        self.held: list[Held] = []
        self.scopes: list[tuple[Any, str, str]] = []  # scope, tag, policy; innermost last
        self.tenant: Tenant | None = None
        self.epochs: Counter[str] = Counter()
        self.intermediates: list[tuple[Held, int, int]] = []  # of graphs: offset and seed
        self.seed = 0
        self.refused = False  # the driver has kept something
        self.waiting = False  # retired pools wait until no scope is open
        for tag in TAGS:  # known from the start
            with cumem.use_memory_pool(tag):
                pass

    # How calls are made

    def attempt(self, call: Callable[[], Any], fault: Fault | None = None) -> Answer:
        if fault is not None:
            self.emulator.fail(*fault)
        try:
            return call(), None
        except (cumem.CumemError, torch.OutOfMemoryError) as error:
            return None, error.with_traceback(None)
        finally:
            self.emulator.clear()
            _runtime.current().allocator.catch_up()  # what a free could not give back goes now
            self.refused |= bool(cumem.stats().refused_calls)

    def now(self) -> Standing:
        return Standing.now(self.emulator)

    def unchanged_since(self, before: Standing) -> bool:
        now = self.now()
        return now == before or (self.waiting and now.no_more_than(before))

    @property
    def free_bytes(self) -> int:
        return CAPACITY - self.emulator.used_bytes()

    def pick(self, number: int) -> Held:
        return self.held[number % len(self.held)]

    # Allocation and death

    @precondition(lambda self: len(self.held) < MOST_TENSORS)
    @rule(tag=tags, policy=policies, size=sizes, dtype=dtypes, fault=faults)
    def allocate(
        self, tag: str, policy: str, size: int, dtype: torch.dtype, fault: Fault | None
    ) -> None:
        def call() -> torch.Tensor:
            with cumem.use_memory_pool(tag, on_sleep=policy):
                return self.empty(size, dtype)

        self.added(call, tag, policy, fault)

    @precondition(lambda self: self.scopes and len(self.held) < MOST_TENSORS)
    @rule(size=sizes, dtype=dtypes, fault=faults)
    def allocate_in_the_open_scope(
        self, size: int, dtype: torch.dtype, fault: Fault | None
    ) -> None:
        _, tag, policy = self.scopes[-1]
        self.added(lambda: self.empty(size, dtype), tag, policy, fault)

    @staticmethod
    def empty(size: int, dtype: torch.dtype) -> torch.Tensor:
        return torch.empty(-(-size // dtype.itemsize), dtype=dtype, device=cumem.default_device())

    def added(
        self, call: Callable[[], torch.Tensor], tag: str, policy: str, fault: Fault | None
    ) -> None:
        before = self.now()
        tensor, error = self.attempt(call, fault)
        if error is not None:
            assert self.refused or self.now().no_more_than(before)
            tensor, error = self.attempt(call)
        if error is not None:
            assert isinstance(error, torch.OutOfMemoryError), error
            assert self.free_bytes < 20 * MIB
            return
        assert cumem.is_mapped(tensor)
        held = Held(tensor, tag, policy)
        self.seed += 1
        held.write(self.seed)
        self.held.append(held)

    @precondition(lambda self: len(self.held) < MOST_TENSORS and self.free_bytes >= 4 * MIB)
    @rule(tag=tags, policy=policies, request=requests)
    def allocate_in_a_capture(self, tag: str, policy: str, request: Request) -> None:
        self.emulator.begin_capture()
        with cumem.use_memory_pool(tag, on_sleep=policy):
            tensor, intermediate = make(700, self.seed + 1), make(5000, self.seed + 2)
            offset = intermediate.data_ptr() - tensor.data_ptr()
            del intermediate
        before = self.now()
        _, error = self.attempt(request.call)
        assert isinstance(error, cumem.BusyError) or request.level == 0
        _, error = self.attempt(cumem.wake_up)
        assert isinstance(error, cumem.BusyError)
        assert self.now() == before
        self.emulator.end_capture()
        held = Held(tensor, tag, policy, graph=True)
        held.write(self.seed + 1)
        self.intermediates.append((held, offset, self.seed + 2))
        self.seed += 2
        self.held.append(held)

    @precondition(lambda self: any(not held.graph for held in self.held))
    @rule(number=picks)
    def drop(self, number: int) -> None:
        chosen = [held for held in self.held if not held.graph]
        self.held.remove(chosen[number % len(chosen)])

    @rule(tag=st.none() | tags, fault=faults)
    def trim(self, tag: str | None, fault: Fault | None) -> None:
        before = self.now()
        given_back, error = self.attempt(lambda: cumem.trim(tag), fault)
        assert error is None
        assert given_back >= 0
        assert self.now().no_more_than(before)
        self.waiting = bool(self.scopes)

    # Scopes

    @precondition(lambda self: len(self.scopes) < 3)
    @rule(tag=tags, policy=policies)
    def open_a_scope(self, tag: str, policy: str) -> None:
        scope = cumem.use_memory_pool(tag, on_sleep=policy)
        scope.__enter__()
        self.scopes.append((scope, tag, policy))

    @precondition(lambda self: self.scopes)
    @rule(number=picks)
    def leave_a_scope(self, number: int) -> None:
        scope, _, _ = self.scopes.pop(number % len(self.scopes))
        scope.__exit__(None, None, None)
