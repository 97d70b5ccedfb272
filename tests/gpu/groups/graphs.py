"""Does a captured graph replay after its memory has slept?"""

from __future__ import annotations

import gc

import cuda_oracle as oracle
import torch
from harness import need, note, run
from support import CUDA, DEVICE, MIB, addresses, capture, warm

import cumem

WIDTH = 1024
REPLAYS = 100


class Product:
    """Static input and output of ``y = x @ w``, w in `weights`, x and y in `io`."""

    def __init__(self) -> None:
        need(CUDA, "CUDA device")
        with cumem.use_memory_pool("weights"):
            self.w = torch.empty(WIDTH, WIDTH, device=DEVICE)
        with cumem.use_memory_pool("io"):
            self.x = torch.empty(WIDTH, WIDTH, device=DEVICE)
            self.y = torch.empty(WIDTH, WIDTH, device=DEVICE)
        self.w.copy_(torch.randn(WIDTH, WIDTH, device=DEVICE))
        self.x.copy_(torch.randn(WIDTH, WIDTH, device=DEVICE))
        self.stream = torch.cuda.Stream()

    def plain(self) -> None:
        torch.mm(self.x, self.w, out=self.y)

    def with_intermediates(self) -> None:
        hidden = torch.relu(self.x @ self.w)
        self.y.copy_(hidden @ self.w + hidden)

    def captured(
        self, *, layers: bool = False, pool: tuple[int, int] | None = None
    ) -> torch.cuda.CUDAGraph:
        body = self.with_intermediates if layers else self.plain
        warm(body, self.stream)  # on the same stream: libraries keep memory for each
        return capture(body, pool=pool, stream=self.stream)

    def answer(self, graph: torch.cuda.CUDAGraph) -> torch.Tensor:
        self.y.zero_()
        graph.replay()
        return self.y.clone()


def graph_replays_after_wake() -> None:
    product = Product()
    graph = product.captured()
    right = product.answer(graph)
    assert right.abs().sum() > 0
    where = addresses([product.w, product.x, product.y])
    for _ in range(3):
        cumem.sleep()
        cumem.wake_up()
        assert addresses([product.w, product.x, product.y]) == where
        assert all(torch.equal(product.answer(graph), right) for _ in range(REPLAYS))


def graph_sees_new_input_and_new_weights_after_wake() -> None:
    product = Product()
    graph = product.captured()
    x, w = torch.randn_like(product.x), torch.randn_like(product.w)
    product.x.copy_(x)
    product.w.copy_(w)
    right = product.answer(graph)
    product.x.zero_()
    product.w.zero_()
    cumem.sleep()
    cumem.wake_up()
    product.x.copy_(x)
    product.w.copy_(w)
    assert torch.equal(product.answer(graph), right)


def first_replay_right_after_wake_is_right() -> None:
    """Nothing between the wake and the replay: no allocation, no synchronisation."""
    product = Product()
    graph = product.captured()
    right = product.answer(graph)
    product.y.zero_()
    cumem.sleep()
    cumem.wake_up()
    graph.replay()
    assert torch.equal(product.y, right)


def private_memory_of_a_graph_sleeps() -> None:
    product = Product()
    with cumem.graph_pool("graphs") as pool:
        graph = product.captured(layers=True, pool=pool.id)
    right = product.answer(graph)
    assert pool.segment_bytes > 0
    before = oracle.free_bytes()
    report = cumem.sleep(tags=["graphs"])
    freed = oracle.free_bytes() - before
    note(f"the graph's private memory: {report.freed_bytes} bytes, the driver says {freed}")
    assert report.freed_bytes == pool.segment_bytes
    assert freed > 0
    cumem.sleep()
    cumem.wake_up()
    assert all(torch.equal(product.answer(graph), right) for _ in range(REPLAYS))


def two_graphs_share_a_sleeping_pool() -> None:
    product = Product()
    with cumem.graph_pool("graphs") as pool:
        first = product.captured(layers=True, pool=pool.id)
        second = product.captured(layers=True, pool=pool.id)
    right = product.answer(first)
    for _ in range(3):
        cumem.sleep()
        cumem.wake_up()
        assert torch.equal(product.answer(second), right)
        assert torch.equal(product.answer(first), right)


def private_memory_comes_back_when_the_graph_is_gone() -> None:
    product = Product()
    with cumem.graph_pool("graphs") as pool:
        graph = product.captured(layers=True, pool=pool.id)
    held = pool.segment_bytes
    right = product.answer(graph)
    assert cumem.trim("graphs") == 0, "memory that a graph still uses was given back"
    assert torch.equal(product.answer(graph), right)
    del graph
    gc.collect()
    torch.cuda.synchronize()
    given = cumem.trim("graphs")
    note(f"given back after the graph was dropped: {given} of {held} bytes")
    assert given == held


def scope_inside_a_capture() -> None:
    product = Product()
    kept: list[torch.Tensor] = []

    def body() -> None:
        with cumem.use_memory_pool("captured"):
            kept.append(torch.empty(WIDTH, WIDTH, device=DEVICE))
            torch.mul(product.x, 2, out=kept[-1])
        product.y.copy_(kept[-1] @ product.w)

    warm(product.plain, product.stream)
    graph = capture(body, stream=product.stream)
    assert cumem.tag_of(kept[0]) == "captured"
    right = product.answer(graph)
    assert right.abs().sum() > 0
    for _ in range(3):
        freed = cumem.sleep().freed_bytes
        assert freed >= 4 * WIDTH * WIDTH * 4
        assert not cumem.is_mapped(kept[0])
        cumem.wake_up()
        assert torch.equal(product.answer(graph), right)
        assert torch.equal(kept[0], product.x * 2)


def capture_of_a_model_with_its_weights_asleep_in_between() -> None:
    need(CUDA, "CUDA device")
    with cumem.use_memory_pool("weights"):
        model = torch.nn.Sequential(
            torch.nn.Linear(512, 2048), torch.nn.GELU(), torch.nn.Linear(2048, 512)
        ).to(DEVICE)
    with cumem.use_memory_pool("io"):
        x = torch.zeros(64, 512, device=DEVICE)
        y = torch.zeros(64, 512, device=DEVICE)
    x.copy_(torch.randn(64, 512, device=DEVICE))
    stream = torch.cuda.Stream()

    def body() -> None:
        with torch.no_grad():
            y.copy_(model(x))

    warm(body, stream)
    with cumem.graph_pool("graphs") as pool:
        graph = capture(body, pool=pool.id, stream=stream)
    graph.replay()
    right = y.clone()
    for tags in (["weights"], ["graphs"], ["io"], ["weights", "graphs", "io"]):
        cumem.sleep(tags=tags)
        cumem.wake_up()
        y.zero_()
        graph.replay()
        assert torch.equal(y, right), tags


if __name__ == "__main__":
    torch.empty(MIB, device=DEVICE)
    oracle.prepare()
    run(
        [
            graph_replays_after_wake,
            graph_sees_new_input_and_new_weights_after_wake,
            first_replay_right_after_wake_is_right,
            private_memory_of_a_graph_sleeps,
            two_graphs_share_a_sleeping_pool,
            private_memory_comes_back_when_the_graph_is_gone,
            scope_inside_a_capture,
            capture_of_a_model_with_its_weights_asleep_in_between,
        ]
    )
