"""Do threads and collections get in each other's way?"""

from __future__ import annotations

import gc
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import pytest
import torch
from crew import Crew
from support import MIB, DriverUnderTest, holds_pattern, in_thread, make, scope_on_a_thread, state

import cumem
from cumem import _runtime


def churn(tag: str) -> Callable[[int], None]:
    """Makes tensors of a tag, looks at them, and drops them; trims now and then."""

    def work(number: int) -> None:
        with cumem.use_memory_pool(tag):
            tensors = [make(1 + (number * 7919 + at * 104_729) % 90_000, at) for at in range(3)]
        del tensors[number % 3]
        seeds = [seed for seed in range(3) if seed != number % 3]
        for seed, tensor in zip(seeds, tensors, strict=True):
            if cumem.is_mapped(tensor):
                assert cumem.tag_of(tensor) == tag
                if tag.startswith("still"):
                    assert holds_pattern(tensor, seed)
        tensors.clear()
        if number % 5 == 0:
            cumem.trim(tag)

    return work


def test_allocation_and_death_on_four_threads_beside_sleep_wake_and_collection() -> None:
    """pytorch#97833, kvcached#371, LMCache#2823, vllm#34600: deadlocks and lost entries."""
    with cumem.use_memory_pool("weights"):
        kept = [make(200_000, seed) for seed in range(4)]
    crew = Crew()

    def move(number: int) -> None:
        try:
            cumem.sleep(tags=["weights", "moving"] if number % 2 else ["weights"])
        except cumem.BusyError:
            assert number % 2  # a thread has a scope of "moving" open
        cumem.wake_up()
        assert all(holds_pattern(tensor, seed) for seed, tensor in enumerate(kept))

    for number in range(2):
        crew.add(f"still {number}", churn(f"still {number}"))
        crew.add(f"moving {number}", churn("moving"))
    crew.add("mover", move)
    crew.add("collector", lambda _: gc.collect(1))
    crew.add("asker", lambda _: (cumem.stats(), cumem.is_sleeping(), cumem.check()))
    crew.run()
    cumem.check()
    assert all(holds_pattern(tensor, seed) for seed, tensor in enumerate(kept))


@pytest.mark.needs("way to slow a drop down")
def test_no_scope_opens_while_a_pool_is_dropped(
    driver: DriverUnderTest, monkeypatch: pytest.MonkeyPatch
) -> None:
    """vllm#46050: torch ends the process when a pool goes while a scope is open."""
    backend = _runtime.current().backend
    drop_pool = backend.drop_pool
    opened, leave = threading.Event(), threading.Event()
    kept: list[torch.Tensor] = []

    def enter() -> None:
        with cumem.use_memory_pool("other"):
            kept.append(make(100, 1))
            opened.set()
            leave.wait(60)

    thread = threading.Thread(target=enter)

    def drop_slowly(pool: Any) -> None:
        if not kept and not thread.is_alive():
            thread.start()
            opened.wait(0.5)
        drop_pool(pool)

    monkeypatch.setattr(backend, "drop_pool", drop_slowly)
    with cumem.use_memory_pool("weights"):
        tensor = make(100)
    del tensor
    try:
        assert cumem.trim() > 0
    finally:
        leave.set()
        thread.join(60)
    assert holds_pattern(kept.pop(), 1)


def test_tensors_die_in_cycles_on_other_threads_while_their_tag_moves() -> None:
    with cumem.use_memory_pool("weights"):
        kept = make(100_000, 1)
    crew = Crew()

    def cycles(_: int) -> None:
        try:
            with cumem.use_memory_pool("weights"):
                cycle: list[object] = [make(5000)]
        finally:
            cycle.append(cycle)

    crew.add("cycles", cycles)
    crew.add("collector", lambda _: gc.collect(0))

    def move(_: int) -> None:
        with suppress(cumem.BusyError):  # a scope of the tag is open
            cumem.sleep()
        cumem.wake_up()

    crew.add("mover", move)
    crew.run(1.5)
    gc.collect()
    assert holds_pattern(kept, 1)


def test_a_thread_without_a_context_may_free_and_ask(driver: DriverUnderTest) -> None:
    with cumem.use_memory_pool("weights"):
        awake = [make(30 * MIB, 1)]
    with cumem.use_memory_pool("draft"):
        asleep = [make(30 * MIB, 2)]
    cumem.sleep(tags=["draft"])
    before = driver.used_bytes()

    def work() -> None:
        awake.clear()
        asleep.clear()
        cumem.trim()
        cumem.check()

    in_thread(work)
    assert before - driver.used_bytes() == 30 * MIB
    assert cumem.stats().segment_bytes == 0
    assert not cumem.is_sleeping()


def test_a_thread_without_a_context_may_put_to_sleep_and_wake() -> None:
    with cumem.use_memory_pool("weights"):
        tensor = make(5000, 1)
    in_thread(cumem.sleep)
    in_thread(cumem.wake_up)
    assert holds_pattern(tensor, 1)


@pytest.mark.needs("slow copies")
@pytest.mark.parametrize("call", ["sleep", "wake_up", "prepare"])
def test_another_thread_ticks_during_a_long_call(driver: DriverUnderTest, call: str) -> None:
    """kvcached#422: the lock of Python's interpreter is free while bytes move."""
    with cumem.use_memory_pool("weights"):
        tensor = make(30 * MIB, 1)
    if call == "wake_up":
        cumem.sleep()
    longest, over = [0.0], threading.Event()

    def tick() -> None:
        last = time.perf_counter()
        while not over.is_set():
            time.sleep(0.001)
            now = time.perf_counter()
            longest[0], last = max(longest[0], now - last), now

    thread = threading.Thread(target=tick)
    thread.start()
    driver.emulator.set_bandwidth(30 * MIB)
    started = time.perf_counter()
    if call == "prepare":
        cumem.prepare(background=False)
    else:
        getattr(cumem, call)()
    took = time.perf_counter() - started
    over.set()
    thread.join()
    driver.emulator.set_bandwidth(0)
    assert call == "prepare" or took > 0.9
    assert longest[0] < 0.7, "a thread stood still"
    cumem.wake_up()
    assert holds_pattern(tensor, 1)


@pytest.mark.needs("slow copies")
def test_allocation_does_not_wait_for_the_sleep_of_another_tag(driver: DriverUnderTest) -> None:
    with cumem.use_memory_pool("weights"):
        tensor = make(30 * MIB, 1)
    driver.emulator.set_bandwidth(6 * MIB)  # five seconds, more than all below takes
    thread = threading.Thread(target=cumem.sleep, kwargs={"tags": ["weights"]})
    thread.start()
    time.sleep(0.1)
    with cumem.use_memory_pool("draft"):
        other = [make(size, size) for size in (100, 3 * MIB, 12 * MIB)]
    assert all(holds_pattern(one, one.numel()) for one in other)
    slept_meanwhile = thread.is_alive()
    driver.emulator.set_bandwidth(0)
    other.clear()
    cumem.trim("draft")  # waits for all work on the device, copies among it
    thread.join(60)
    assert slept_meanwhile, "the allocation waited"
    cumem.wake_up()
    assert holds_pattern(tensor, 1)


def test_two_threads_enter_a_tag_at_once_again_and_again() -> None:
    """pytorch#161193: "beginAllocateToPool: already recording"."""
    turn = threading.Barrier(2)
    kept: dict[tuple[int, int], torch.Tensor] = {}
    crew = Crew()

    def enter(who: int) -> Callable[[int], None]:
        def work(number: int) -> None:
            if number >= 50:
                return
            turn.wait(60)
            with cumem.use_memory_pool("weights"):
                kept[who, number] = make(2000, who * 50 + number)

        return work

    crew.add("one", enter(0))
    crew.add("two", enter(1))
    crew.run(1.5)
    cumem.sleep()
    cumem.wake_up()
    assert all(holds_pattern(kept[who, number], who * 50 + number) for who, number in kept)
    kept.clear()


def test_a_busy_sleep_names_the_thread_and_leaves_every_byte() -> None:
    with cumem.use_memory_pool("weights"):
        tensor = make(5000, 1)
    with cumem.use_memory_pool("kv_cache"):
        kv = make(5000, 2)
    epochs = [cumem.epoch(tag) for tag in ("weights", "kv_cache")]
    with scope_on_a_thread("kv_cache", name="decode-3"):
        before = (state(), cumem.stats().host_bytes)
        for call in ({}, {"level": 2}, {"offload_tags": ["weights"]}):
            with pytest.raises(cumem.BusyError, match=r"'decode-3'.*'kv_cache'"):
                cumem.sleep(**call)
        assert (state(), cumem.stats().host_bytes) == before
        assert holds_pattern(tensor, 1)
        assert holds_pattern(kv, 2)
    assert [cumem.epoch(tag) for tag in ("weights", "kv_cache")] == epochs
