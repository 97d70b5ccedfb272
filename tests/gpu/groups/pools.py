"""Do pools give memory back, serve several threads, and leave the caller's context alone?"""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable
from contextlib import ExitStack

import cuda_oracle as oracle
import torch
from harness import need, note, run
from support import (
    CUDA,
    DEVICE,
    GIB,
    GRANULE,
    KIB,
    MIB,
    fill,
    holds,
    in_thread,
    intact,
    make,
    scaled,
    segments_of,
)
from witness import Witness

import cumem

POOLS = 500
AT_ONCE = 25


def trim_gives_memory_back_to_others() -> None:
    need(CUDA, "CUDA device")
    with Witness() as witness:
        kept = make("weights", [64 * MIB])
        torch.cuda.empty_cache()
        start = witness.free_bytes()
        tensors = make("kv_cache", [2 * GIB, 300 * MIB, 5 * MIB])
        torch.cuda.empty_cache()  # what the checks themselves left
        full = witness.free_bytes()
        assert start - full >= sum(tensor.numel() for tensor in tensors)
        del tensors
        gc.collect()
        torch.cuda.empty_cache()
        assert witness.free_bytes() <= full + GRANULE, "torch keeps a pool's memory until trim"
        given = cumem.trim("kv_cache")
        assert given >= 2 * GIB + 300 * MIB
        assert abs(witness.free_bytes() - start) <= GRANULE * 3
        assert intact(kept)


def trim_leaves_what_is_live() -> None:
    tensors = make("weights", [30 * MIB, 30 * MIB, KIB])
    del tensors[1]
    first, last = tensors
    assert cumem.trim("weights") >= 30 * MIB
    assert holds(first, 0)
    assert holds(last, 2)
    cumem.sleep()
    cumem.wake_up()
    assert holds(first, 0)
    assert holds(last, 2)


def what_dies_asleep_comes_back_to_the_driver() -> None:
    tensors = make("weights", [30 * MIB, 30 * MIB])
    before = cumem.stats().reserved_addresses
    cumem.sleep()
    del tensors[1]
    assert cumem.trim("weights") >= 30 * MIB
    assert cumem.stats().reserved_addresses <= before - 30 * MIB
    cumem.wake_up()
    assert intact(tensors)


def hundreds_of_pools_made_and_dropped() -> None:
    cumem.configure(cumem.Options(warn_empty_scope=False))  # most of the scopes are
    first = make("many", [KIB])
    cumem.sleep()
    cumem.wake_up()  # what is set up once is set up
    del first
    cumem.trim()
    before = cumem.stats()
    free = oracle.free_bytes()
    for number in range(POOLS // AT_ONCE):
        with ExitStack() as scopes:
            pools = [scopes.enter_context(cumem.use_memory_pool("many")) for _ in range(AT_ONCE)]
            last = torch.empty(MIB, device=DEVICE)
            tensors = [last]
        assert len({pool.id for pool in pools}) == AT_ONCE
        for _ in range(AT_ONCE - 1):  # the idle pools are used again
            with cumem.use_memory_pool("many"):
                tensors.append(torch.empty(64, device=DEVICE))
        if number % 5 == 0:
            cumem.sleep()
            cumem.wake_up()
        del tensors, last
        cumem.trim("many")
        assert segments_of("many") == 0
    after = cumem.stats()
    assert abs(oracle.free_bytes() - free) <= GRANULE
    assert after.reserved_addresses == before.reserved_addresses
    assert after.physical_bytes == before.physical_bytes
    assert after.quarantined_segments == 0


def two_threads_in_scopes_of_one_tag() -> None:
    cumem.configure(cumem.Options(warn_empty_scope=False))
    threads = 4
    inside = threading.Barrier(threads, timeout=60)
    made: dict[int, list[torch.Tensor]] = {}
    ids: dict[int, tuple[int, int]] = {}

    def work(number: int) -> None:
        for _ in range(10):
            inside.wait()
            with cumem.use_memory_pool("weights") as pool:
                ids[number] = pool.id
                inside.wait()
                sizes = (KIB, 3 * MIB, 30 * MIB)
                mine = [torch.empty(size, dtype=torch.uint8, device=DEVICE) for size in sizes]
            made[number] = mine
            for seed, tensor in enumerate(mine):
                fill(tensor, 10 * number + seed)
            inside.wait()

    workers = [threading.Thread(target=work, args=(number,)) for number in range(threads)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert len(set(ids.values())) == threads
    assert len(made) == threads
    for _ in range(2):
        cumem.sleep()
        cumem.wake_up()
        for number, tensors in made.items():
            assert {cumem.tag_of(tensor) for tensor in tensors} == {"weights"}
            assert all(holds(tensor, 10 * number + seed) for seed, tensor in enumerate(tensors))


def threads_allocate_while_another_sleeps_and_wakes() -> None:
    tensors = make("weights", [scaled(300 * MIB), 5 * MIB])
    stop = threading.Event()
    rounds = [0, 0, 0]
    failures: list[BaseException] = []

    def churn(number: int) -> None:
        try:
            while not stop.is_set():
                with cumem.use_memory_pool(f"churn {number}"):
                    mine = torch.empty(3 * MIB, dtype=torch.uint8, device=DEVICE)
                fill(mine, number)
                assert holds(mine, number)
                del mine
                rounds[number] += 1
        except BaseException as error:  # noqa: BLE001 - shown by the thread that waits
            failures.append(error)

    workers = [threading.Thread(target=churn, args=(number,)) for number in range(len(rounds))]
    for worker in workers:
        worker.start()
    for _ in range(30):
        cumem.sleep(tags=["weights"])
        gc.collect()
        cumem.wake_up(["weights"])
    stop.set()
    for worker in workers:
        worker.join()
    assert not failures, failures
    assert intact(tensors)
    note(f"rounds of the other threads: {rounds}")
    assert all(rounds)


def calls_to_try(tensor: torch.Tensor) -> dict[str, Callable[[], object]]:
    """Every public call that may touch the driver."""

    def scope() -> None:
        with cumem.use_memory_pool("context"):
            torch.empty(3 * MIB, device=DEVICE).fill_(1)
            kept.append(torch.empty(1, device=DEVICE))

    def graphs() -> None:
        with cumem.graph_pool("context graphs"):
            pass

    kept: list[torch.Tensor] = []
    return {
        "use_memory_pool": scope,
        "graph_pool": graphs,
        "keep": lambda: cumem.keep(tensor),
        "sleep": cumem.sleep,
        "stats asleep": cumem.stats,
        "check asleep": cumem.check,
        "wake_up": cumem.wake_up,
        "sleep level 2": lambda: cumem.sleep(level=2),
        "wake_up filled": lambda: cumem.wake_up(fill="zero"),
        "stats": cumem.stats,
        "check": cumem.check,
        "is_mapped": lambda: cumem.is_mapped(tensor),
        "tag_of": lambda: cumem.tag_of(tensor),
        "sleeping_tags": cumem.sleeping_tags,
        "trim": cumem.trim,
        "release_host_memory": cumem.release_host_memory,
        "configure": lambda: cumem.configure(cumem.Options()),
    }


def the_context_is_unchanged_by_every_call() -> None:
    tensor = make("weights", [5 * MIB])[0]
    before = oracle.current_context()
    assert before != 0
    for name, call in calls_to_try(tensor).items():
        call()
        assert oracle.current_context() == before, name
        if CUDA:
            assert torch.cuda.current_device() == 0, name


def a_thread_without_a_context_gets_none_but_the_primary_one() -> None:
    tensor = make("weights", [5 * MIB])[0]
    primary = oracle.current_context()

    def work() -> None:
        for name, call in calls_to_try(tensor).items():
            before = oracle.current_context()
            call()
            after = oracle.current_context()
            # Torch itself makes the primary context current where there is none.
            assert after in (before, primary), (name, before, after)

    in_thread(work)


if __name__ == "__main__":
    torch.empty(1, device=DEVICE)
    oracle.prepare()
    run(
        [
            trim_gives_memory_back_to_others,
            trim_leaves_what_is_live,
            what_dies_asleep_comes_back_to_the_driver,
            hundreds_of_pools_made_and_dropped,
            two_threads_in_scopes_of_one_tag,
            threads_allocate_while_another_sleeps_and_wakes,
            the_context_is_unchanged_by_every_call,
            a_thread_without_a_context_gets_none_but_the_primary_one,
        ]
    )
