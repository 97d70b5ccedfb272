"""Does the drop-in for vLLM's allocator do on a GPU what an engine expects of it?"""

from __future__ import annotations

import cuda_oracle as oracle
import torch
from harness import expect, need, note, run
from support import CUDA, DEVICE, GIB, MIB, fill, holds, scaled, warm

import cumem
from cumem.compat.vllm import CuMemAllocator

WIDTH = 1024


def pooled_and_plain_memory_work_together() -> None:
    allocator = CuMemAllocator()
    plain = torch.zeros(WIDTH, WIDTH, device=DEVICE)
    with allocator.use_memory_pool():
        one = torch.ones(WIDTH, WIDTH, device=DEVICE)
        two = torch.full((WIDTH, WIDTH), 2.0, device=DEVICE)
    before = oracle.free_bytes()
    allocator.sleep()
    assert oracle.free_bytes() > before
    allocator.wake_up()
    assert bool((plain + one + two == 3).all())


def a_wake_without_memory_is_an_error_that_loses_nothing() -> None:
    need(CUDA, "CUDA device")
    allocator = CuMemAllocator()
    size = min(oracle.free_bytes() * 6 // 10, 24 * GIB)
    with allocator.use_memory_pool():
        tensor = torch.empty(size, dtype=torch.uint8, device=DEVICE)
    fill(tensor, 1)
    allocator.sleep()
    tenant = torch.empty(oracle.free_bytes() - size // 2, dtype=torch.uint8, device=DEVICE)
    text = expect(RuntimeError, allocator.wake_up)
    note(text[:160])
    assert not cumem.is_mapped(tensor)
    del tenant
    torch.cuda.empty_cache()
    allocator.wake_up()
    assert holds(tensor, 1)


def a_captured_graph_replays_over_discarded_and_restored_memory() -> None:
    need(CUDA, "CUDA device")
    allocator = CuMemAllocator()
    with allocator.use_memory_pool():
        weight = torch.eye(WIDTH, device=DEVICE)
    with allocator.use_memory_pool("discard"):
        cache = torch.empty(WIDTH, WIDTH, device=DEVICE)
    x = torch.empty(128, WIDTH, device=DEVICE)
    y = torch.empty(128, WIDTH, device=DEVICE)
    stream = torch.cuda.Stream()

    def body() -> None:
        out = x @ weight
        cache[: out.size(0)].copy_(out)
        y.copy_(out + 1)

    warm(body, stream)
    graph = torch.cuda.CUDAGraph()
    with allocator.cudagraph_pool() as pool, torch.cuda.graph(graph, pool=pool, stream=stream):
        body()
    other = torch.cuda.CUDAGraph()
    with allocator.cudagraph_pool() as again, torch.cuda.graph(other, pool=again, stream=stream):
        body()
    assert pool == again
    for replayed in (graph, other):
        before = oracle.free_bytes()
        allocator.sleep()
        freed = oracle.free_bytes() - before
        note(f"sleep freed {freed} bytes, graphs' memory included")
        assert freed >= 2 * WIDTH * WIDTH * 4
        allocator.wake_up(["weights"])  # graphs, default and discard come with any wake
        x.copy_(torch.rand(128, WIDTH, device=DEVICE))
        replayed.replay()
        torch.cuda.synchronize()
        assert torch.allclose(cache[:128], x, rtol=1e-2)
        assert torch.allclose(y, x + 1, rtol=1e-2)


def an_engines_life() -> None:
    """Weights, cache and workspace through both levels, and a wake in stages."""
    allocator = CuMemAllocator()
    sizes = {"weights": scaled(512 * MIB), "kv_cache": scaled(1024 * MIB), "workspace": 4 * MIB}
    tensors = {}
    for seed, (tag, size) in enumerate(sizes.items()):
        with allocator.use_memory_pool(tag):
            tensors[tag] = torch.empty(size, dtype=torch.uint8, device=DEVICE)
        fill(tensors[tag], seed)
    where = {tag: tensor.data_ptr() for tag, tensor in tensors.items()}
    for _ in range(3):
        allocator.sleep(("weights",))
        assert not any(cumem.is_mapped(tensor) for tensor in tensors.values())
        allocator.wake_up(["weights"])
        assert cumem.is_mapped(tensors["workspace"])
        assert not cumem.is_mapped(tensors["kv_cache"])
        assert holds(tensors["weights"], 0)
        allocator.wake_up(["kv_cache"])
    allocator.discard("kv_cache")
    assert holds(tensors["weights"], 0)
    allocator.wake_up()
    allocator.sleep(())
    allocator.wake_up()
    fill(tensors["weights"], 7)
    assert holds(tensors["weights"], 7)
    assert where == {tag: tensor.data_ptr() for tag, tensor in tensors.items()}
    used = allocator.get_current_usage()
    assert used >= sum(sizes.values())


def weights_that_are_converted_leave_nothing_behind() -> None:
    allocator = CuMemAllocator()
    size = scaled(2048 * MIB)
    with allocator.use_memory_pool("weights"):
        wide = [torch.empty(size, dtype=torch.uint8, device=DEVICE) for _ in range(4)]
        narrow = torch.empty(size // 2, dtype=torch.uint8, device=DEVICE)
        wide.clear()
    fill(narrow, 1)
    assert allocator.get_current_usage() < size
    allocator.sleep("weights")
    assert allocator.wake_up().mapped_bytes < size
    assert holds(narrow, 1)


if __name__ == "__main__":
    torch.empty(MIB, device=DEVICE)
    oracle.prepare()
    run(
        [
            pooled_and_plain_memory_work_together,
            a_wake_without_memory_is_an_error_that_loses_nothing,
            a_captured_graph_replays_over_discarded_and_restored_memory,
            an_engines_life,
            weights_that_are_converted_leave_nothing_behind,
        ]
    )
