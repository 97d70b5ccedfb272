"""Does any program of calls, failures and neighbours lose a byte?

Random programs against a model; ``CUMEM_HYPOTHESIS_PROFILE=long`` searches for hours.
"""

from __future__ import annotations

import gc
import warnings
from collections import Counter
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import pytest
import torch
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)
from model import (
    CALLS_OF_A_MOVE,
    CANNOT_BE_UNDONE,
    CODES,
    DRIVER_CALLS,
    Fault,
    Held,
    Request,
    Standing,
    Tenant,
    check_stats,
    count_lost,
)
from profiles import chosen_profile
from support import GRANULE, MIB, holds_pattern, make, memory_at, outside_scopes

import cumem
from cumem.testing import emulated_driver

pytestmark = [pytest.mark.needs("failures on request"), pytest.mark.timeout(0)]

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
options = st.builds(
    cumem.Options,
    chunk_bytes=st.sampled_from([GRANULE, 6 * MIB, 256 * MIB]),
    host_limit_bytes=st.sampled_from([None, None, MIB, 12 * MIB]),
    allow_pageable=st.booleans(),
    retain_backup=st.booleans(),
    clean_check=st.sampled_from(list(cumem.CleanCheck)),
    warn_empty_scope=st.just(False),
)

Answer = tuple[Any, Exception | None]


class Life(RuleBasedStateMachine):
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

    def teardown(self) -> None:
        try:
            self.emulator.clear()
            for scope, _, _ in self.scopes:
                scope.__exit__(None, None, None)
            self.held.clear()
            self.intermediates.clear()
            self.give_back_device_memory()
            cumem.configure(cumem.Options(warn_empty_scope=False))
            gc.collect()
            cumem.wake_up()
            cumem.trim()
            cumem.release_host_memory()
            cumem.check()
            if not self.refused:
                assert self.emulator.used_bytes() == 0
                stats = cumem.stats()
                assert (stats.segment_bytes, stats.reserved_addresses, stats.host_bytes) == (
                    0,
                    0,
                    0,
                )
                assert stats.handles_created == stats.handles_released
        finally:
            self.stack.close()
            cumem.configure(cumem.Options())

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
            stats = cumem.stats()
            self.refused |= bool(stats.refused_calls or stats.quarantined_segments)

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
            # A shortage, and then a refusal to take back what there was, leaves a quarantine.
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

    # Sleep and wake

    @rule(request=requests, fault=faults, undo=st.booleans())
    def sleep(self, request: Request, fault: Fault | None, undo: bool) -> None:
        plan, before = request.plan(), self.now()
        busy = any(request.covers(tag) for _, tag, _ in self.scopes)
        report, error = self.attempt(request.call, fault)
        if busy:
            assert isinstance(error, cumem.BusyError)
            assert self.now() == before
            return
        if error is None:
            self.went_to_sleep(request)
            self.check_report(report, plan, before)
            return
        if not self.unchanged_since(before):
            assert fault is not None
            assert fault.call in CANNOT_BE_UNDONE, (fault, error)
        self.went_to_sleep(request, partly=True)
        self.see_to_it(request, undo=undo)

    def went_to_sleep(self, request: Request, *, partly: bool = False) -> None:
        going = request.chosen(self.held)
        if partly:
            going = [held for held in going if not cumem.is_mapped(held.tensor)]
        lost = [held for held in going if held.sleep(request)]
        count_lost(lost, self.epochs)
        self.intermediates = [item for item in self.intermediates if item[0] not in lost]

    def see_to_it(self, request: Request, *, undo: bool) -> None:
        """A failed sleep can be taken back, or goes on when it is called again."""
        self.tensors_are_as_expected()
        if undo:
            self.woke(None, None)
            return
        report, error = self.attempt(request.call)
        if error is not None:
            assert isinstance(error, cumem.HostOutOfMemoryError), error
            assert self.options.host_limit_bytes is not None
            cumem.configure(cumem.Options(warn_empty_scope=False))
            report = request.call()
            cumem.configure(self.options)
        assert report.copied_bytes + report.skipped_bytes == report.offloaded_bytes
        self.went_to_sleep(request)

    def check_report(
        self, report: cumem.SleepReport, plan: cumem.SleepPlan, before: Standing
    ) -> None:
        assert report.copied_bytes + report.skipped_bytes == report.offloaded_bytes
        assert report.copied_bytes >= 0
        assert report.skipped_bytes >= 0
        if not self.waiting:
            assert before.used_bytes - self.emulator.used_bytes() == report.freed_bytes
            assert (plan.freed_bytes, plan.tags) == (report.freed_bytes, report.tags)
            assert plan.offloaded_bytes == report.offloaded_bytes
            assert plan.discarded_bytes == report.discarded_bytes

    @precondition(lambda self: not self.scopes and any(not held.asleep for held in self.held))
    @rule(fault=faults_of_a_move, undo=st.booleans(), offload=st.none() | some_tags)
    def fail_a_sleep(self, fault: Fault, undo: bool, offload: tuple[str, ...] | None) -> None:
        self.sleep(Request(1, None, offload), fault, undo)

    @precondition(lambda self: any(held.asleep for held in self.held))
    @rule(fault=faults_of_a_move, fill=fills)
    def fail_a_wake(self, fault: Fault, fill: str | None) -> None:
        self.wake(None, fill, fault)

    @precondition(
        lambda self: not self.scopes and any(held.contents is not None for held in self.held)
    )
    @rule(seed=picks)
    def cycle_and_write(self, seed: int) -> None:
        self.sleep(Request(1, None, TAGS), None, False)
        self.wake(None, None, None)
        if any(not held.asleep for held in self.held):
            self.write(seed)

    @rule(chosen=some_tags, fill=fills, fault=faults)
    def wake(self, chosen: tuple[str, ...] | None, fill: str | None, fault: Fault | None) -> None:
        before = self.now()
        report, error = self.attempt(lambda: cumem.wake_up(chosen, fill=fill), fault)
        if error is not None:
            assert self.unchanged_since(before), (fault, error)
            self.tensors_are_as_expected()
        self.woke(chosen, fill, report)

    def woke(
        self,
        chosen: tuple[str, ...] | None,
        fill: str | None,
        report: cumem.WakeReport | None = None,
    ) -> None:
        """Wakes, if that has not been done, and books it; the device may be full."""
        error = None
        if report is None:
            report, error = self.attempt(lambda: cumem.wake_up(chosen, fill=fill))
        if error is not None:
            assert isinstance(error, cumem.DeviceOutOfMemoryError), error
            return
        waking = [
            held for held in self.held if held.asleep and (chosen is None or held.tag in chosen)
        ]
        assert {held.tag for held in waking if held.lost} <= report.undefined <= report.tags
        assert {held.tag for held in waking} <= report.tags
        for held in waking:
            held.wake(fill)

    # Contents

    @precondition(lambda self: any(not held.asleep for held in self.held))
    @rule(number=picks)
    def write(self, number: int) -> None:
        awake = [held for held in self.held if not held.asleep]
        self.seed += 1
        awake[number % len(awake)].write(self.seed)

    @precondition(lambda self: self.held)
    @rule(number=picks, keep=st.booleans())
    def keep_or_declare_clean(self, number: int, keep: bool) -> None:
        held = self.pick(number)
        if keep:
            cumem.keep(held.tensor)
            held.kept = True
        else:
            cumem.mark_clean(held.tensor)
            held.declared = True

    # The host, the options, and the neighbours

    @rule(chosen=some_tags, fault=faults, release=st.booleans())
    def prepare_or_release_host_memory(
        self, chosen: tuple[str, ...] | None, fault: Fault | None, release: bool
    ) -> None:
        before = self.now()
        if release:
            _, error = self.attempt(cumem.release_host_memory, fault)
            assert error is None
        else:
            self.attempt(lambda: cumem.prepare(chosen, background=False), fault)
        assert self.now() == before

    @rule(chosen=options)
    def configure(self, chosen: cumem.Options) -> None:
        cumem.configure(chosen)
        self.options = chosen

    @precondition(lambda self: self.tenant is None and self.free_bytes > 40 * MIB)
    @rule(leaves=st.sampled_from([0, GRANULE, 20 * MIB, 40 * MIB]))
    def another_tenant_takes_and_dirties_memory(self, leaves: int) -> None:
        self.tenant = Tenant(self.emulator.machine, (self.free_bytes - leaves) // GRANULE * GRANULE)
        self.tenant.__enter__()
        self.tenant.dirty()

    @precondition(lambda self: self.tenant is not None)
    @rule()
    def give_back_device_memory(self) -> None:
        tenant, self.tenant = self.tenant, None
        if tenant is not None:
            tenant.__exit__()

    # What holds after every step

    @invariant()
    def tensors_are_as_expected(self) -> None:
        for held in self.held:
            held.check()
        for held, offset, seed in self.intermediates:
            if not held.asleep:
                with outside_scopes():
                    assert holds_pattern(memory_at(held.address + offset, 5000), seed)

    @invariant()
    def the_books_add_up(self) -> None:
        cumem.check()
        check_stats(self.emulator, refused=self.refused)
        for tag in TAGS:
            assert cumem.epoch(tag) == self.epochs[tag]
        asleep = {held.tag for held in self.held if held.asleep}
        assert asleep <= cumem.sleeping_tags()
        assert cumem.is_sleeping() == bool(cumem.sleeping_tags())


def test_no_program_loses_a_byte() -> None:
    run_state_machine_as_test(Life, settings=chosen_profile())
