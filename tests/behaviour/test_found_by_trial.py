"""Do faults that were found by trial stay away?"""

from __future__ import annotations

import copy
import threading
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from support import MIB

import cumem


def make_cache(on_sleep: str) -> cumem.PagedKVCache:
    return cumem.PagedKVCache(
        layers=3,
        blocks=64,
        block_size=16,
        kv_heads=8,
        head_dim=128,
        dtype=torch.bfloat16,
        on_sleep=on_sleep,
    )


@pytest.mark.parametrize("on_sleep", ["offload", "discard"])
def test_no_block_is_handed_out_once_a_sleep_has_asked_what_is_in_use(on_sleep: str) -> None:
    cache = make_cache(on_sleep)
    refused = []

    def engine(_segments: object) -> None:
        with pytest.raises(cumem.BusyError, match="under way") as caught:
            cache.allocate("late", 16)
        refused.append(caught.value)

    hook = cumem.on_before_unmap(engine)
    cumem.sleep()
    hook.remove()
    assert len(refused) == 1
    cumem.wake_up()
    assert cache.sequences == ()
    assert cache.allocate("late", 16) == (0,)


def test_a_wake_passes_over_what_another_thread_loads(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    save_file({"a": torch.arange(8 * MIB // 4, dtype=torch.int32)}, path)
    with cumem.use_memory_pool("weights"):
        kept = torch.ones(1000, device=cumem.default_device())
    seen, done = [], threading.Event()

    def watch() -> None:
        while not done.is_set():
            seen.append((cumem.is_sleeping(), cumem.wake_up().mapped_bytes))

    thread = threading.Thread(target=watch)
    thread.start()
    try:
        for _ in range(10):
            tensors = cumem.load_file(path)
            assert torch.equal(tensors["a"].cpu(), torch.arange(8 * MIB // 4, dtype=torch.int32))
            del tensors
    finally:
        done.set()
        thread.join()
    assert seen
    assert set(seen) == {(False, 0)}
    assert kept.sum() == 1000


def test_hooks_of_a_streamed_wake_do_not_pile_up_and_leave_copies_alone() -> None:
    class Model(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.used, self.unused = torch.nn.Linear(8, 8), torch.nn.Linear(8, 8)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.used(x)

    device = cumem.default_device()
    with cumem.use_memory_pool("weights"):
        model = Model().to(device)
    for _ in range(3):
        cumem.sleep()
        handle = cumem.stream_wake(model)
        model(torch.ones(1, 8, device=device))
    assert len(model.unused._forward_pre_hooks) == 1
    for tensor in model.unused.parameters():
        handle.wait_for(tensor)
    twin = copy.deepcopy(model.unused)
    twin(torch.ones(1, 8, device=device))
    assert (len(model.unused._forward_pre_hooks), len(twin._forward_pre_hooks)) == (1, 0)
    handle.wait()
    assert len(model.unused._forward_pre_hooks) == 0


def test_a_declaration_ends_where_contents_were_discarded(tmp_path: Path) -> None:
    cumem.configure(cumem.Options(clean_check="declared"))
    path = tmp_path / "model.safetensors"
    save_file({"a": torch.full((9,), 5.0)}, path)
    tensor = cumem.load_file(path, tag="weights", on_sleep="reload")["a"]
    cumem.sleep(level=2)
    cumem.wake_up(fill="zero")
    cumem.sleep()
    cumem.wake_up()
    assert tensor.tolist() == [0.0] * 9
