"""What do programs for torch_memory_saver do, and what do they see?

Each scenario is a program over the interface that both libraries have. It yields what it
sees, a name and a value each: whether contents are there, what the driver says is free (in
tensors), which exception came. ``expected`` is what the drop-in shows, in order, and
``differs`` where the original is documented to differ (``docs/migrating.md``).

Scenarios may follow each other in one process: each has tags of its own and leaves them
active. ``ENDS`` stands for an observation that never came, because the process ended.
"""

from __future__ import annotations

from typing import Any

import torch
from saver_machine import DONE, Difference, Machine, Observations, Scenario, Value, attempt


def _simple(saver: Any, machine: Machine) -> Observations:
    plain = machine.fill(machine.empty(), 1)
    with saver.region():
        tensor = machine.empty()
    where = tensor.data_ptr()
    machine.fill(tensor, 2)
    saver.pause()  # takes what is taken once
    saver.resume()
    yield "freed by pause", machine.freed(saver.pause)
    other = machine.fill(machine.empty(), 3)
    yield "taken by resume", -machine.freed(saver.resume)
    yield "address unchanged", tensor.data_ptr() == where
    yield "can be written again", machine.holds(machine.fill(tensor, 4), 4)
    yield "plain tensors untouched", machine.holds(plain, 1) and machine.holds(other, 3)


def _backup(saver: Any, machine: Machine) -> Observations:
    with saver.region(enable_cpu_backup=True):
        kept = machine.empty()
    with saver.region(enable_cpu_backup=False):
        lost = machine.empty()
    where = kept.data_ptr(), lost.data_ptr()
    for cycle in range(2):
        machine.fill(kept, cycle), machine.fill(lost, 7)
        saver.pause()
        copy = saver.get_cpu_backup(kept)
        alike = copy.device.type == "cpu" and (copy.shape, copy.dtype) == (kept.shape, kept.dtype)
        yield f"backup {cycle} is a cpu tensor alike", alike
        yield f"backup {cycle} holds the contents", machine.holds(copy, cycle)
        other = machine.fill(machine.empty(2), 9)  # memory that a resume gets is dirty
        del other
        saver.resume()
        yield f"contents {cycle} came back", machine.holds(kept, cycle)
        yield f"no backup while active {cycle}", saver.get_cpu_backup(kept) is None
        yield f"without backup it can be written {cycle}", machine.holds(machine.fill(lost, 8), 8)
    yield "addresses unchanged", (kept.data_ptr(), lost.data_ptr()) == where


def _tags(saver: Any, machine: Machine) -> Observations:
    tensors = {}
    for seed, tag in enumerate(("tag one", "tag two")):
        with saver.region(tag=tag, enable_cpu_backup=True):
            tensors[tag] = machine.empty()
        machine.fill(tensors[tag], seed)
    yield "freed by one", machine.freed(lambda: saver.pause("tag one"))
    yield "the other is there", machine.holds(tensors["tag two"], 1)
    yield "freed by two", machine.freed(lambda: saver.pause("tag two"))
    yield "taken by two", -machine.freed(lambda: saver.resume("tag two"))
    yield "two came back alone", machine.holds(tensors["tag two"], 1)
    yield "taken by one", -machine.freed(lambda: saver.resume("tag one"))
    yield "one came back", machine.holds(tensors["tag one"], 0)
    yield "pause of an unknown tag", attempt(lambda: saver.pause("tag nobody has"))
    yield "resume of an unknown tag", attempt(lambda: saver.resume("tag nobody has"))
    yield "both are there", all(machine.holds(t, s) for s, t in enumerate(tensors.values()))


def _nested(saver: Any, machine: Machine) -> Observations:
    with saver.region(tag="outer", enable_cpu_backup=True):
        first = machine.empty()
        with saver.region(tag="inner", enable_cpu_backup=False):
            inner = machine.empty()
        last = machine.empty()
    machine.fill(first, 1), machine.fill(inner, 2), machine.fill(last, 3)
    yield "freed by the inner", machine.freed(lambda: saver.pause("inner"))
    yield "the outer is there", machine.holds(first, 1) and machine.holds(last, 3)
    yield "freed by the outer", machine.freed(lambda: saver.pause("outer"))
    yield "backup of what came last", machine.holds(saver.get_cpu_backup(last), 3)
    saver.resume("outer"), saver.resume("inner")
    yield "the outer came back", machine.holds(first, 1) and machine.holds(last, 3)
    yield "the inner can be written", machine.holds(machine.fill(inner, 4), 4)


def _rollout_and_training(saver: Any, machine: Machine) -> Observations:
    """Captured once; cache and weights are away while a trainer makes new weights."""
    with saver.region(tag="rollout weights"):
        weights = machine.empty()
    with saver.region(tag="rollout cache"):
        cache = machine.empty()
    asked, answer = machine.empty(), machine.empty()
    where = weights.data_ptr(), cache.data_ptr()

    def step() -> None:
        torch.add(asked, weights, out=cache)
        torch.mul(cache, 3, out=answer)

    machine.fill(weights, 0), machine.fill(asked, 0)
    replay = machine.captured(step)
    for turn in range(1, 4):
        freed = machine.freed(lambda: saver.pause("rollout cache"))
        yield (
            f"freed before training {turn}",
            freed + machine.freed(lambda: saver.pause("rollout weights")),
        )
        trained = machine.fill(machine.empty(), turn)
        saver.resume("rollout weights")
        weights.copy_(trained)
        saver.resume("rollout cache")
        machine.fill(asked, 10 * turn)
        replay()
        yield f"rollout {turn} used them", torch.equal(answer, (asked + trained) * 3)
    yield "addresses unchanged", (weights.data_ptr(), cache.data_ptr()) == where


def _memory_of_a_graph(saver: Any, machine: Machine) -> Observations:
    with saver.region(tag="graph input", enable_cpu_backup=True):
        asked = machine.empty()
    answer = torch.zeros_like(asked)

    def body() -> None:
        middle = asked + 5
        answer.copy_(middle * 3)

    machine.fill(asked, 1)
    body()
    machine.wait()
    graph = torch.cuda.CUDAGraph()
    with saver.cuda_graph(graph, tag="graph"):
        body()
    saver.pause("graph"), saver.resume("graph")
    freed = machine.freed(lambda: saver.pause("graph"))
    yield "freed what lies between", freed >= 0.95
    yield "freed by the input", machine.freed(lambda: saver.pause("graph input"))
    other = machine.fill(machine.empty(2), 9)
    del other
    saver.resume("graph input"), saver.resume("graph")
    for seed in (1, 2):
        machine.fill(asked, seed), answer.zero_()
        graph.replay()
        machine.wait()
        yield f"replay {seed} is right", torch.equal(answer, (asked + 5) * 3)


def _graph_in_a_pool(saver: Any, machine: Machine) -> Observations:
    tensor = machine.empty()

    def capture() -> None:
        with saver.cuda_graph(torch.cuda.CUDAGraph(), tag="graph in a pool"):
            torch.mul(tensor + 1, 2, out=tensor)

    torch.mul(tensor + 1, 2, out=tensor)
    machine.wait()
    yield "capture", attempt(capture)


def _two_devices(saver: Any, machine: Machine) -> Observations:
    tensors = []
    for index in range(2):
        with torch.cuda.device(index), saver.region(tag="devices", enable_cpu_backup=True):
            tensors.append(machine.empty(device=torch.device("cuda", index)))
        machine.fill(tensors[-1], index)
    saver.pause("devices"), saver.resume("devices")
    before = [machine.free_bytes(index) for index in range(2)]
    saver.pause("devices")
    for index in range(2):
        freed = machine.free_bytes(index) - before[index]
        yield f"freed on {index}", round(freed / machine.size, 2)
    saver.resume("devices")
    yield "contents came back", all(machine.holds(t, s) for s, t in enumerate(tensors))


def _seen_again(cycles: int = 2) -> dict[str, Value]:
    names = ("backup {} is a cpu tensor alike", "backup {} holds the contents")
    names += ("contents {} came back", "no backup while active {}")
    names += ("without backup it can be written {}",)
    return {name.format(cycle): True for cycle in range(cycles) for name in names}


SCENARIOS: dict[str, Scenario] = {
    "simple": Scenario(
        _simple,  # the first of its process: it pauses all there is and weighs it
        {
            "freed by pause": 1.0,
            "taken by resume": 1.0,
            "address unchanged": True,
            "can be written again": True,
            "plain tensors untouched": True,
        },
    ),
    "backup": Scenario(_backup, {**_seen_again(), "addresses unchanged": True}),
    "tags": Scenario(
        _tags,
        {
            "freed by one": 1.0,
            "the other is there": True,
            "freed by two": 1.0,
            "taken by two": 1.0,
            "two came back alone": True,
            "taken by one": 1.0,
            "one came back": True,
            "pause of an unknown tag": DONE,
            "resume of an unknown tag": DONE,
            "both are there": True,
        },
    ),
    "nested": Scenario(
        _nested,
        {
            "freed by the inner": 1.0,
            "the outer is there": True,
            "freed by the outer": 2.0,
            "backup of what came last": True,
            "the outer came back": True,
            "the inner can be written": True,
        },
    ),
    "rollout_and_training": Scenario(
        _rollout_and_training,
        {
            **{
                name: value
                for turn in range(1, 4)
                for name, value in (
                    (f"freed before training {turn}", 2.0),
                    (f"rollout {turn} used them", True),
                )
            },
            "addresses unchanged": True,
        },
    ),
    "memory_of_a_graph": Scenario(
        _memory_of_a_graph,
        {
            "freed what lies between": True,
            "freed by the input": 1.0,
            "replay 1 is right": True,
            "replay 2 is right": True,
        },
        needs_graphs=True,
        original="tms-preload",
    ),
    "graph_in_a_pool": Scenario(
        _graph_in_a_pool,
        {"capture": DONE},
        {"capture": Difference("AssertionError")},  # it wants its library preloaded
        needs_graphs=True,
    ),
    "two_devices": Scenario(
        _two_devices,
        {"freed on 0": 1.0, "freed on 1": 1.0, "contents came back": True},
        needs_devices=2,
    ),
}
