"""Does any program of calls, failures and neighbours lose a byte?

Random programs against a model; ``CUMEM_HYPOTHESIS_PROFILE=long`` searches for hours.
"""

from __future__ import annotations

import gc

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import (
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)
from model import (
    CANNOT_BE_UNDONE,
    Fault,
    Request,
    Standing,
    Tenant,
    check_stats,
    count_lost,
)
from profiles import chosen_profile
from programs import (
    TAGS,
    Allocations,
    faults,
    faults_of_a_move,
    fills,
    options,
    picks,
    requests,
    some_tags,
)
from support import GRANULE, MIB, holds_pattern, memory_at, outside_scopes

import cumem

pytestmark = [pytest.mark.needs("failures on request"), pytest.mark.timeout(0)]


class Life(Allocations):
    """Sleep, wake, contents and neighbours; and what holds after every step."""

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
