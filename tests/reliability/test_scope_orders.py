"""May scopes, pools and tensors go in any order, also in a capture and on other threads?"""

from __future__ import annotations

import gc
import itertools
from collections.abc import Iterator

import pytest
import torch
from support import DriverUnderTest, holds_pattern, in_thread, make

import cumem

STEPS = ("leave a", "leave b", "drop a", "drop b", "trim", "collect")


@pytest.mark.parametrize("captured", [False, True], ids=["", "in a capture"])
@pytest.mark.needs("capture without kernels")
def test_scopes_and_pools_go_in_every_order(driver: DriverUnderTest, captured: bool) -> None:
    """vllm#46050, pytorch#145168: pools that go before, between or after what is in them."""
    cumem.configure(cumem.Options(warn_empty_scope=False))
    orders = list(itertools.permutations(STEPS))[:: 9 if captured else 6]
    for order in orders:
        scopes = {name: cumem.use_memory_pool(f"tag {name}") for name in "ab"}
        if captured:
            driver.emulator.begin_capture()
        kept = {}
        for seed, (name, scope) in enumerate(scopes.items()):
            scope.__enter__()
            kept[name] = [make(3000, seed)]
            kept[name].append(kept[name])  # only a collection ends it
        for step in order:
            action, _, name = step.partition(" ")
            if action == "leave":
                scopes.pop(name).__exit__(None, None, None)
            elif action == "drop":
                del kept[name]
            elif action == "trim":
                cumem.trim()
            else:
                gc.collect(0)
        if captured:
            driver.emulator.end_capture()
        cumem.check()
    gc.collect()
    cumem.trim()
    assert driver.used_bytes() == 0


@pytest.mark.needs("capture without kernels")
def test_a_pool_dropped_inside_a_capture_goes_when_the_capture_ends(
    driver: DriverUnderTest,
) -> None:
    with cumem.use_memory_pool("weights"):
        tensor = make(5000)
    driver.emulator.begin_capture()
    del tensor
    cumem.trim()
    gc.collect(0)
    assert driver.used_bytes() > 0
    driver.emulator.end_capture()  # it raises when the capture is spoilt
    cumem.trim()
    assert driver.used_bytes() == 0


def test_an_abandoned_scope_of_a_dead_thread_can_be_left_by_another() -> None:
    scopes = [cumem.use_memory_pool("weights")]
    tensor = in_thread(lambda: (scopes[0].__enter__(), make(100, 1))[1])
    with pytest.raises(cumem.BusyError):
        cumem.sleep()
    with pytest.raises(RuntimeError, match="another thread"):
        scopes.pop().__exit__(None, None, None)
    cumem.sleep()
    cumem.wake_up()
    assert holds_pattern(tensor, 1)


def test_a_suspended_generator_may_end_on_any_thread() -> None:
    def build() -> Iterator[torch.Tensor]:
        with cumem.use_memory_pool("weights"):
            yield make(100, 1)

    generators = [build() for _ in range(3)]
    tensors = [next(generator) for generator in generators]
    in_thread(generators.pop().close)
    generators.clear()
    gc.collect()
    cumem.sleep()
    cumem.wake_up()
    assert all(holds_pattern(tensor, 1) for tensor in tensors)
