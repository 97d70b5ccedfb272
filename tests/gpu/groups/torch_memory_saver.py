"""Does the drop-in for torch_memory_saver do on a GPU what programs written for it expect?"""

from __future__ import annotations

import cuda_oracle as oracle
import torch
from harness import expect, need, note, run
from support import CUDA, DEVICE, MIB, fill, holds, scaled, warm

import cumem
from cumem.compat.torch_memory_saver import TorchMemorySaver

WIDTH = 1024
SIZE = scaled(512 * MIB)


def _made(count: int, seed: int) -> torch.Tensor:
    tensor = torch.empty(count, dtype=torch.uint8, device=DEVICE)
    return fill(tensor, seed)


def _cached(saver: TorchMemorySaver, tag: str, seed: int, *, backup: bool) -> torch.Tensor:
    with saver.region(tag, enable_cpu_backup=backup):
        tensor = torch.empty(SIZE, dtype=torch.uint8, device=DEVICE)
    return fill(tensor, seed)


def paused_memory_is_free_and_comes_back() -> None:
    saver = TorchMemorySaver()
    kept = _cached(saver, "weights", 1, backup=True)
    lost = _cached(saver, "kv_cache", 2, backup=False)
    saver.pause()  # takes what is taken once: the kernel for digests, its buffers
    saver.resume()
    fill(lost, 2)
    where, before = (kept.data_ptr(), lost.data_ptr()), oracle.free_bytes()
    saver.pause("kv_cache")
    saver.pause()
    freed = oracle.free_bytes() - before
    note(f"paused {2 * SIZE} bytes, the driver says {freed} more are free")
    assert freed >= 2 * SIZE
    other = _made(SIZE, 3)
    copy = saver.get_cpu_backup(kept)
    assert copy is not None
    assert holds(copy, 1)
    del other, copy
    torch.cuda.empty_cache() if CUDA else None
    saver.resume("kv_cache")
    saver.resume("weights")
    saver.resume()
    assert where == (kept.data_ptr(), lost.data_ptr())
    assert holds(kept, 1)
    fill(lost, 4)
    assert holds(lost, 4)


def graphs_and_their_memory_are_paused() -> None:
    need(CUDA, "CUDA device")
    saver = TorchMemorySaver()
    with saver.region("weights", enable_cpu_backup=True):
        weight = torch.empty(WIDTH, WIDTH, device=DEVICE)
    with saver.region("io", enable_cpu_backup=True):
        x = torch.empty(WIDTH, WIDTH, device=DEVICE)
        y = torch.empty(WIDTH, WIDTH, device=DEVICE)
    weight.copy_(torch.randn(WIDTH, WIDTH, device=DEVICE))
    stream = torch.cuda.Stream()

    def body() -> None:
        hidden = torch.relu(x @ weight)
        y.copy_(hidden @ weight + hidden)

    warm(body, stream)
    first, second = torch.cuda.CUDAGraph(), torch.cuda.CUDAGraph()
    shared = torch.cuda.graph_pool_handle()
    with saver.cuda_graph(first, pool=shared, stream=stream, tag="graph"):
        body()
    held = cumem.stats()
    graphs = {tag.tag: tag.segment_bytes for tag in held.tags}["graph"]
    assert graphs > 0, "the intermediate tensors are not in the pool"
    with saver.cuda_graph(second, pool=shared, stream=stream, tag="graph"):
        body()
    with saver.cuda_graph(torch.cuda.CUDAGraph(), pool=first.pool(), stream=stream, tag="graph"):
        body()
    for cycle in range(3):
        x.copy_(torch.randn(WIDTH, WIDTH, device=DEVICE))
        body()
        right = y.clone()
        before = oracle.free_bytes()
        saver.pause()
        freed = oracle.free_bytes() - before
        assert freed >= graphs + 3 * WIDTH * WIDTH * 4
        saver.resume()
        for graph in (first, second):
            y.zero_()
            graph.replay()
            torch.cuda.synchronize()
            assert torch.allclose(y, right), cycle
    note(f"private memory of the graphs: {graphs} bytes, paused with the rest")


def a_loop_of_rollout_and_training() -> None:
    """Captured once; the cache and weights are paused while a trainer runs; new weights."""
    need(CUDA, "CUDA device")
    saver = TorchMemorySaver()
    with saver.region("weights"):
        weight = torch.empty(WIDTH, WIDTH, device=DEVICE)
    with saver.region("kv_cache"):
        cache = torch.empty(WIDTH, WIDTH, device=DEVICE)
    x = torch.randn(WIDTH, WIDTH, device=DEVICE)
    y = torch.empty(WIDTH, WIDTH, device=DEVICE)
    stream = torch.cuda.Stream()

    def body() -> None:
        torch.mm(x, weight, out=cache)
        torch.add(cache, 1, out=y)

    weight.zero_()
    warm(body, stream)
    graph = torch.cuda.CUDAGraph()
    with saver.cuda_graph(graph, stream=stream, tag="graph"):
        body()
    for step in range(1, 4):
        saver.pause("kv_cache")
        saver.pause("weights")
        trained = torch.full((WIDTH, WIDTH), float(step), device=DEVICE)
        saver.resume("weights")
        weight.copy_(trained)
        saver.resume("kv_cache")
        graph.replay()
        right = x @ trained + 1
        assert torch.allclose(y, right, rtol=1e-4, atol=1e-2), step


def several_devices_pause_together() -> None:
    need(CUDA and torch.cuda.device_count() > 1, "second CUDA device")
    saver = TorchMemorySaver()
    tensors = []
    for index in range(2):
        with torch.cuda.device(index), saver.region("weights", enable_cpu_backup=True):
            tensors.append(torch.empty(SIZE, dtype=torch.uint8, device=f"cuda:{index}"))
        fill(tensors[-1], index)
    saver.pause("weights")
    assert not any(cumem.is_mapped(tensor) for tensor in tensors)
    saver.resume("weights")
    assert all(holds(tensor, index) for index, tensor in enumerate(tensors))


def a_margin_is_kept_and_disabled_memory_is_torchs() -> None:
    saver = TorchMemorySaver()
    with saver.region("weights", enable_cpu_backup=True):
        first = torch.empty(SIZE, dtype=torch.uint8, device=DEVICE)
        with saver.disable():
            plain = torch.empty(SIZE, dtype=torch.uint8, device=DEVICE)
    fill(first, 1), fill(plain, 2)
    saver.pause()
    assert holds(plain, 2)
    saver.resume()
    assert holds(first, 1)
    saver.memory_margin_bytes = oracle.free_bytes() - SIZE
    with saver.region("more"):
        expect(
            torch.OutOfMemoryError,
            lambda: torch.empty(2 * SIZE, dtype=torch.uint8, device=DEVICE),
        )
        fits = torch.empty(MIB, dtype=torch.uint8, device=DEVICE)
    saver.memory_margin_bytes = 0
    assert holds(fill(fits, 3), 3)


if __name__ == "__main__":
    torch.empty(MIB, device=DEVICE)
    oracle.prepare()
    run(
        [
            paused_memory_is_free_and_comes_back,
            graphs_and_their_memory_are_paused,
            a_loop_of_rollout_and_training,
            several_devices_pause_together,
            a_margin_is_kept_and_disabled_memory_is_torchs,
        ]
    )
