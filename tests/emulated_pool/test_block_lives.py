"""Is each block of the emulated pool freed once, whenever and wherever its tensors end?"""

from __future__ import annotations

import gc
import itertools
import mmap
import os
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from fake_plugin import FakePlugin, Owner, blocks, in_thread, is_of, live, ramp, take

from cumem import _emulated_pool
from cumem._emulated_pool import EmulatedMemPool, empty_cache, memory_snapshot, use_emulated_pool

MIB = 1 << 20


def test_a_block_is_freed_once_with_the_last_view(pool: EmulatedMemPool) -> None:
    with use_emulated_pool(pool):
        base = ramp(100)
        view = base[50:]
        array = base.numpy()
        del base
        assert len(live(pool)) == 1
        del view
        assert len(live(pool)) == 1
        del array
    assert live(pool) == []


def test_tensors_may_die_on_any_thread_and_in_cycles(pool: EmulatedMemPool) -> None:
    with use_emulated_pool(pool):
        kept = [ramp(100 * n) for n in range(1, 9)]
        cycle: list[object] = [ramp(50)]
        cycle.append(cycle)
    in_thread(kept.clear)
    del cycle
    gc.collect()
    assert live(pool) == []
    assert blocks(pool) == [(2 * MIB, "inactive")]


def at_line(count: int, action: Callable[[], object]) -> Any:
    """A trace function that runs `action` before the count-th line of the pool's code."""
    seen = itertools.count(1)

    def trace(frame: Any, event: str, arg: object) -> Any:
        if frame.f_code.co_filename != _emulated_pool.__file__:
            return None
        if event == "line" and next(seen) == count:
            action()
        return trace

    return trace


def test_a_finalizer_may_use_pools_at_any_point_of_a_call(plugin: FakePlugin) -> None:
    other = EmulatedMemPool(plugin.functions, 0)
    for count in itertools.count(1):
        pool, retired = (EmulatedMemPool(plugin.functions, device) for device in (0, 1))
        kept = take(pool, 512, 2048, 512, 1024, 512)
        take(retired, 512)
        done: list[int] = []

        def finalizer(
            pool: EmulatedMemPool = pool, kept: list[Owner] = kept, done: list[int] = done
        ) -> None:
            del kept[3]
            with use_emulated_pool(other):
                kept += take(pool, 700, 2048)
            empty_cache()
            done += [len(pool.snapshot()), len(memory_snapshot())]

        del kept[1]
        before = sys.gettrace()
        sys.settrace(at_line(count, finalizer))
        try:
            kept += take(pool, 900, MIB, MIB, 100)
            retired.retire()
            empty_cache()
        finally:
            sys.settrace(before)
        empty_cache()
        assert_tiled(pool)
        assert len(live(pool)) == len(kept)
        assert not [info for info in memory_snapshot() if is_of(info, retired)]
        kept.clear()
        pool.retire()
        if not done:
            break
    assert count > 60


def assert_tiled(pool: EmulatedMemPool) -> None:
    for segment in pool.snapshot():
        end = segment["address"]
        for block in segment["blocks"]:
            assert block["address"] == end
            end += block["size"]
        assert end == segment["address"] + segment["total_size"]
        states = [block["state"] for block in segment["blocks"]]
        assert ("inactive", "inactive") not in itertools.pairwise(states)


def test_garbage_collection_at_any_time_leaves_tensors_whole(
    plugin: FakePlugin, pool: EmulatedMemPool
) -> None:
    class Maker:
        def __init__(self) -> None:
            self.cycle = self
            self.tensor = ramp(20)

        def __del__(self) -> None:
            with use_emulated_pool(EmulatedMemPool(plugin.functions, 0)):
                made.append(ramp(30))

    made: list[torch.Tensor] = []
    kept: list[torch.Tensor] = []
    thresholds = gc.get_threshold()
    gc.set_threshold(1, 1, 1)
    try:
        with use_emulated_pool(pool):
            for count in range(40):
                Maker()
                kept.append(ramp(10 + count))
                del kept[:-20:2]
    finally:
        gc.set_threshold(*thresholds)
    gc.collect()
    assert all(torch.equal(tensor, ramp(30)) and plugin.holds(tensor) for tensor in made)
    assert all(torch.equal(tensor, ramp(len(tensor))) for tensor in kept)
    assert (len(made), len(live(pool))) == (40, len(kept))


def test_threads_that_make_and_drop_tensors_at_once_keep_theirs(plugin: FakePlugin) -> None:
    pools = [EmulatedMemPool(plugin.functions, 0) for _ in range(4)]
    kept: dict[int, list[torch.Tensor]] = {}

    def work(index: int) -> None:
        mine = kept.setdefault(index, [])
        with use_emulated_pool(pools[index]):
            for count in range(200):
                mine.append(ramp(count + 1) + index)
                kept.get((index + 1) % 4, [None])[:] = kept.get((index + 1) % 4, [None])[-30:]

    threads = [threading.Thread(target=work, args=(index,)) for index in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for index, mine in kept.items():
        assert all(torch.equal(tensor, ramp(len(tensor)) + index) for tensor in mine)
    assert sum(len(live(pool)) for pool in pools) == sum(map(len, kept.values()))


def test_memory_that_is_asleep_is_not_touched(plugin: FakePlugin, pool: EmulatedMemPool) -> None:
    with use_emulated_pool(pool):
        kept, lost = ramp(1000), ramp(2000)
    plugin.protect(mmap.PROT_NONE if hasattr(mmap, "PROT_NONE") else 0)
    view = kept.view(10, 100)[3]
    del lost
    gc.collect()
    assert live(pool) == [8192]
    with use_emulated_pool(EmulatedMemPool(FakePlugin().functions, 0)):
        view = view[7:]
    plugin.protect(mmap.PROT_READ | mmap.PROT_WRITE)
    assert torch.equal(view, ramp(1000)[307:400])
    assert torch.equal(kept, ramp(1000))


def test_a_forked_child_leaves_the_memory_to_its_parent(
    plugin: FakePlugin, pool: EmulatedMemPool
) -> None:
    with use_emulated_pool(pool):
        kept = ramp(10)
        child = os.fork()
        if child == 0:
            escaped = not plugin.holds(torch.ones(10))
            try:
                pool.allocate(1)
            except RuntimeError as error:
                os._exit(0 if escaped and "forked" in str(error) else 1)
            os._exit(2)
        assert os.waitpid(child, 0)[1] == 0
    assert torch.equal(kept, ramp(10))


def test_live_tensors_at_exit_are_silent() -> None:
    script = f"""
import sys, threading, torch
sys.path[:0] = {[str(Path(__file__).parent)]!r}
from fake_plugin import FakePlugin
from cumem._emulated_pool import EmulatedMemPool, use_emulated_pool
plugin = FakePlugin()
pool = EmulatedMemPool(plugin.functions, 0)
scope = use_emulated_pool(pool)
scope.__enter__()
module = torch.nn.Linear(9, 9)
loss = module(torch.ones(3, 9)).sum()
torch.kept = torch.ones(5)
torch.kept.self = torch.kept
local = threading.local()
local.tensor = torch.ones(7)
threading.Thread(target=lambda: local.__setattr__("tensor", module.weight * 2)).start()
scripted = torch.jit.freeze(torch.jit.trace(module.eval(), torch.ones(3, 9)))
"""
    paths = [str(Path(_emulated_pool.__file__).parents[1]), *sys.path]
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", script],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
