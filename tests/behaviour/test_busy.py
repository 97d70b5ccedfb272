"""What is refused while a scope or a capture is open, and what waits?"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

import pytest
import torch
from support import MIB, DriverUnderTest, holds_pattern, make, scope_on_a_thread, state

import cumem


def test_a_sleep_inside_a_scope_of_the_tag_names_the_thread_and_changes_nothing() -> None:
    with cumem.use_memory_pool("weights"):
        tensor = make(1000)
        before = state()
        with pytest.raises(cumem.BusyError, match="MainThread") as caught:
            cumem.sleep()
        assert state() == before
    assert "'weights'" in str(caught.value)
    assert "leave the scope" in str(caught.value)
    assert cumem.sleep().tags == {"weights"}
    cumem.wake_up()
    assert holds_pattern(tensor)


@pytest.mark.parametrize("call", [{}, {"tags": ["weights"]}, {"level": 2}, {"offload_tags": []}])
def test_a_sleep_beside_a_scope_of_the_tag_names_the_thread(call: dict[str, object]) -> None:
    with cumem.use_memory_pool("weights"):
        tensor = make(1000)
    with scope_on_a_thread("weights", name="loader-7"):
        before = state()
        with pytest.raises(cumem.BusyError, match="loader-7"):
            cumem.sleep(**call)
        assert state() == before
        assert holds_pattern(tensor)
    assert cumem.sleep(**call).tags == {"weights"}


def test_a_busy_tag_keeps_the_others_from_nothing() -> None:
    with cumem.use_memory_pool("kv_cache"):
        kv = make(1000)
    with scope_on_a_thread("weights", name="loader"):
        with pytest.raises(cumem.BusyError):
            cumem.sleep(tags=["kv_cache", "weights"])
        assert not cumem.is_sleeping()
        assert cumem.sleep(tags=["kv_cache"]).tags == {"kv_cache"}
    cumem.wake_up()
    del kv


def test_tags_may_sleep_and_wake_inside_a_scope_of_another_tag() -> None:
    with cumem.use_memory_pool("weights"):
        weights = make(1000, 1)
    with cumem.use_memory_pool("other"):
        inside = make(1000, 2)
        cumem.sleep(tags=["weights"])
        more = make(1000, 3)
        cumem.wake_up(["weights"])
        assert holds_pattern(weights, 1)
    assert cumem.tag_of(inside) == cumem.tag_of(more) == "other"
    assert holds_pattern(inside, 2)
    assert holds_pattern(more, 3)


def test_level_0_is_never_busy() -> None:
    with cumem.use_memory_pool("weights"):
        tensor = make(10)
        assert cumem.sleep(level=0).tags == frozenset()
    del tensor


def test_a_tag_may_wake_while_a_scope_of_it_is_open() -> None:
    with cumem.use_memory_pool("weights"):
        old = make(1000, 1)
    cumem.sleep()
    with cumem.use_memory_pool("weights"):
        new = make(1000, 2)
        cumem.wake_up()
        assert holds_pattern(old, 1)
        more = make(1000, 3)
    assert holds_pattern(new, 2)
    assert holds_pattern(more, 3)


def test_a_scope_entered_during_a_sleep_waits_and_gets_fresh_memory() -> None:
    with cumem.use_memory_pool("weights"):
        old = make(30 * MIB, 1)
    rounds = 20
    made: list[torch.Tensor] = []
    turn = threading.Barrier(2)

    def enter() -> None:
        for seed in range(rounds):
            turn.wait(60)
            with cumem.use_memory_pool("weights"):
                made.append(make(100, seed))
            turn.wait(60)

    thread = threading.Thread(target=enter)
    thread.start()
    for _ in range(rounds):
        turn.wait(60)
        try:
            cumem.sleep()
        except cumem.BusyError:  # the scope came first
            pass
        else:
            assert not cumem.is_mapped(old)
        turn.wait(60)
        cumem.wake_up()
    thread.join(60)
    assert holds_pattern(old, 1)
    assert all(holds_pattern(tensor, seed) for seed, tensor in enumerate(made))
    made.clear()


def test_a_scope_that_waited_comes_before_the_next_move() -> None:
    with cumem.use_memory_pool("weights"):
        tensor = make(1000)
    threads: list[threading.Thread] = []
    leave = threading.Event()

    def scope() -> None:
        with cumem.use_memory_pool("weights"):
            late = make(1000)
            leave.wait(60)
        assert holds_pattern(late)

    def come_too_late(_segments: object) -> None:
        threads.append(threading.Thread(target=scope, name="latecomer"))
        threads[0].start()
        time.sleep(0.1)  # it waits at its entry by now

    handle = cumem.on_before_unmap(come_too_late)
    cumem.sleep()
    handle.remove()
    try:
        cumem.wake_up()
        with pytest.raises(cumem.BusyError, match="latecomer"):
            cumem.sleep()
    finally:
        leave.set()
        threads[0].join(60)
    assert holds_pattern(tensor)


def test_two_sleeps_at_once_are_one_sleep() -> None:
    with cumem.use_memory_pool("weights"):
        tensors = [make(5 * MIB, seed) for seed in range(4)]
    barrier = threading.Barrier(3)
    reports: list[cumem.SleepReport] = []

    def work() -> None:
        barrier.wait(60)
        reports.append(cumem.sleep())

    threads = [threading.Thread(target=work) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert sorted(len(report.tags) for report in reports) == [0, 0, 1]
    cumem.wake_up()
    assert all(holds_pattern(tensor, seed) for seed, tensor in enumerate(tensors))


# Captures


@pytest.mark.needs("capture without kernels")
@pytest.mark.parametrize("index", range(4))
@pytest.mark.parametrize("call", [cumem.sleep, cumem.wake_up], ids=["sleep", "wake_up"])
def test_a_capture_is_left_intact(
    driver: DriverUnderTest, index: int, call: Callable[[], object]
) -> None:
    emulator = driver.emulator
    with cumem.use_memory_pool("weights"):
        tensor = make(1000)
    if call is cumem.wake_up:
        cumem.sleep()
    before = state()
    emulator.begin_capture(emulator.stream(index))
    with pytest.raises(cumem.BusyError, match="capture"):
        call()
    emulator.end_capture(emulator.stream(index))
    assert state() == before
    call()
    cumem.wake_up()
    assert holds_pattern(tensor)


@pytest.mark.needs("capture without kernels")
def test_scopes_and_questions_leave_a_capture_intact(driver: DriverUnderTest) -> None:
    with cumem.use_memory_pool("weights"):
        tensor = make(1000, 1)
    driver.emulator.begin_capture()
    with cumem.use_memory_pool("graphs"):
        inside = make(1000, 2)
    assert cumem.is_mapped(tensor)
    assert not cumem.is_sleeping()
    assert cumem.stats().segment_bytes > 0
    cumem.check()
    driver.emulator.end_capture()
    cumem.sleep()
    cumem.wake_up()
    assert holds_pattern(tensor, 1)
    assert holds_pattern(inside, 2)


# Work under way


@pytest.mark.needs("stream that cumem has never heard of")
@pytest.mark.parametrize("blocking", [True, False])
def test_pending_work_on_any_stream_is_in_the_backup(
    driver: DriverUnderTest, blocking: bool
) -> None:
    with cumem.use_memory_pool("weights"):
        tensor = make(4096)
    stream = driver.emulator.new_stream(blocking=blocking)
    late = bytes(range(256)) * 16
    driver.emulator.enqueue(stream=stream, write=(tensor.data_ptr(), late), delay=0.05)
    cumem.sleep()
    cumem.wake_up()
    assert bytes(tensor.tolist()) == late


@pytest.mark.needs("stream that cumem has never heard of")
def test_a_copy_out_of_a_tensor_is_done_before_its_memory_goes(driver: DriverUnderTest) -> None:
    with cumem.use_memory_pool("weights"):
        tensor = make(4096, 1)
    expected = bytes(tensor.tolist())
    copy = bytearray(4096)
    stream = driver.emulator.new_stream()
    driver.emulator.enqueue(stream=stream, read=(tensor.data_ptr(), copy), delay=0.05)
    cumem.sleep(level=2)
    assert copy == expected
    cumem.wake_up()


@pytest.mark.needs("slow copies")
def test_contents_are_whole_when_a_slow_wake_returns(driver: DriverUnderTest) -> None:
    with cumem.use_memory_pool("weights"):
        tensors = [make(3 * MIB, seed) for seed in range(3)]
    driver.emulator.set_bandwidth(200 * MIB)
    cumem.sleep()
    cumem.wake_up()
    assert all(holds_pattern(tensor, seed) for seed, tensor in enumerate(tensors))


@pytest.mark.needs("slow copies")
def test_other_threads_run_during_a_long_copy(driver: DriverUnderTest) -> None:
    with cumem.use_memory_pool("weights"):
        tensor = make(40 * MIB)
    driver.emulator.set_bandwidth(200 * MIB)
    slept = threading.Event()
    thread = threading.Thread(target=lambda: (cumem.sleep(), slept.set()))
    thread.start()
    ticks = 0
    while not slept.is_set():
        ticks += 1
    thread.join(60)
    assert ticks > 1000
    cumem.wake_up()
    assert holds_pattern(tensor)
