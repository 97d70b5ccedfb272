"""Does a capture under way survive whatever cumem is asked to do meanwhile?"""

from __future__ import annotations

import ctypes
import gc
from collections.abc import Callable

import cuda_oracle as oracle
import torch
from harness import expect, need, run
from support import CUDA, DEVICE, MIB, capture, fill, holds, in_thread, intact, make, warm

import cumem
from cumem import _C

WIDTH = 512


class Work:
    """A captured product, and something that happens in the middle of its capture."""

    def __init__(self) -> None:
        need(CUDA, "CUDA device")
        # Small whole numbers: every way to add them up gives the same sum.
        self.x = torch.randint(-4, 5, (WIDTH, WIDTH), device=DEVICE).float()
        self.y = torch.zeros(WIDTH, WIDTH, device=DEVICE)
        self.right = self.x @ self.x + 1
        self.stream = torch.cuda.Stream()

    def half(self) -> None:
        torch.mm(self.x, self.x, out=self.y)

    def captured_around(self, event: Callable[[], object]) -> torch.cuda.CUDAGraph:
        def body() -> None:
            self.half()
            event()
            self.y.add_(1)

        warm(self.half, self.stream)
        return capture(body, stream=self.stream)

    def check(self, graph: torch.cuda.CUDAGraph) -> None:
        for _ in range(3):
            self.y.zero_()
            graph.replay()
            assert torch.equal(self.y, self.right)


def busy(call: Callable[[], object]) -> Callable[[], None]:
    def refused() -> None:
        text = expect(cumem.BusyError, call)
        assert "capture" in text, text

    return refused


def plugin_functions() -> tuple[Callable[..., int], Callable[..., None]]:
    """The two functions that torch calls: malloc (bytes, device, stream) and free."""
    library = ctypes.CDLL(_C.__file__)
    malloc, free = library.cumem_malloc, library.cumem_free
    malloc.argtypes = (ctypes.c_ssize_t, ctypes.c_int, ctypes.c_void_p)
    malloc.restype = ctypes.c_void_p
    free.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_void_p)
    free.restype = None
    return malloc, free


def sleep_during_a_capture_is_refused() -> None:
    tensor = fill(make("weights", [30 * MIB])[0], 3)
    work = Work()
    graph = work.captured_around(busy(cumem.sleep))
    assert not cumem.is_sleeping()
    assert holds(tensor, 3)
    work.check(graph)
    cumem.sleep()  # now it is possible
    cumem.wake_up()
    assert holds(tensor, 3)
    work.check(graph)


def sleep_by_another_thread_during_a_capture_is_refused() -> None:
    tensor = fill(make("weights", [30 * MIB])[0], 3)
    work = Work()
    graph = work.captured_around(lambda: in_thread(busy(cumem.sleep)))
    assert not cumem.is_sleeping()
    assert holds(tensor, 3)
    work.check(graph)


def wake_during_a_capture_is_refused() -> None:
    tensor = fill(make("weights", [30 * MIB])[0], 3)
    work = Work()
    cumem.sleep()
    graph = work.captured_around(busy(cumem.wake_up))
    assert not cumem.is_mapped(tensor)
    work.check(graph)
    cumem.wake_up()
    assert holds(tensor, 3)


def wake_by_another_thread_during_a_capture_is_refused() -> None:
    tensor = fill(make("weights", [30 * MIB])[0], 3)
    work = Work()
    cumem.sleep()
    graph = work.captured_around(lambda: in_thread(busy(cumem.wake_up)))
    assert not cumem.is_mapped(tensor)
    work.check(graph)
    cumem.wake_up()
    assert holds(tensor, 3)


def questions_during_a_capture_are_answered() -> None:
    tensor = make("weights", [30 * MIB])[0]
    work = Work()

    def ask() -> None:
        assert cumem.is_mapped(tensor)
        assert cumem.tag_of(tensor) == "weights"
        assert not cumem.is_sleeping()
        assert cumem.stats().segment_bytes >= 30 * MIB
        cumem.check()

    work.check(work.captured_around(ask))
    work.check(work.captured_around(lambda: in_thread(ask)))


def allocation_by_another_thread_during_a_capture() -> None:
    work = Work()
    made: list[torch.Tensor] = []

    def allocate() -> None:
        with cumem.use_memory_pool("late"):
            made.append(torch.empty(30 * MIB, dtype=torch.uint8, device=DEVICE))

    graph = work.captured_around(lambda: in_thread(allocate))
    work.check(graph)
    fill(made[0], 9)
    cumem.sleep()
    cumem.wake_up()
    assert cumem.tag_of(made[0]) == "late"
    assert holds(made[0], 9)
    work.check(graph)


def trim_during_a_capture_waits_for_its_end() -> None:
    need(CUDA, "CUDA device")
    make("idle", [30 * MIB])  # nobody holds the tensor: its pool is idle and wholly free
    gc.collect()
    torch.cuda.empty_cache()
    work = Work()
    given: list[int] = []
    graph = work.captured_around(lambda: given.append(cumem.trim()))
    assert given == [0]
    work.check(graph)
    before = oracle.free_bytes()
    assert cumem.trim() >= 30 * MIB
    assert oracle.free_bytes() - before >= 30 * MIB
    work.check(graph)


def free_during_a_capture_is_put_off() -> None:
    """A free as torch makes it when it gives a segment back, straight through the plugin."""
    work = Work()
    kept = make("weights", [MIB])
    malloc, free = plugin_functions()
    cumem.configure(cumem.Options(warn_empty_scope=False))
    with cumem.use_memory_pool("direct"):
        address = malloc(30 * MIB, torch.cuda.current_device(), None)
    assert oracle.is_mapped(address)
    graph = work.captured_around(lambda: free(address, 30 * MIB, 0, None))
    assert oracle.is_mapped(address), "memory was unmapped while a capture was under way"
    assert cumem.stats().waiting_frees == 1
    work.check(graph)
    cumem.sleep(tags=["weights"])  # the next call that may wait does what was put off
    assert cumem.stats().waiting_frees == 0
    assert not oracle.is_mapped(address)
    cumem.wake_up()
    assert intact(kept)
    work.check(graph)


def trim_during_a_capture_leaves_what_torch_caches() -> None:
    """Torch has a cached block of its own: giving it back would end the capture."""
    make("idle", [30 * MIB])
    work = Work()
    warm(work.half, work.stream)
    graph = torch.cuda.CUDAGraph()
    cached = torch.empty(64 * MIB, dtype=torch.uint8, device=DEVICE)
    del cached
    with torch.cuda.stream(work.stream):
        graph.capture_begin()  # unlike torch.cuda.graph, it does not clear the caches
        try:
            work.half()
            cumem.trim()
            work.y.add_(1)
        finally:
            graph.capture_end()
    work.check(graph)


if __name__ == "__main__":
    torch.empty(1, device=DEVICE)
    oracle.prepare()
    run(
        [
            sleep_during_a_capture_is_refused,
            sleep_by_another_thread_during_a_capture_is_refused,
            wake_during_a_capture_is_refused,
            wake_by_another_thread_during_a_capture_is_refused,
            questions_during_a_capture_are_answered,
            allocation_by_another_thread_during_a_capture,
            trim_during_a_capture_waits_for_its_end,
            free_during_a_capture_is_put_off,
            trim_during_a_capture_leaves_what_torch_caches,
        ]
    )
