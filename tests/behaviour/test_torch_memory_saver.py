"""Does what torch_memory_saver's users rely on hold for the drop-in?"""

from __future__ import annotations

import pytest
import torch
from support import MIB, DriverUnderTest, holds_pattern, make, raw, same_bytes
from torch_memory_saver_support import (
    saver_fixture,  # noqa: F401 - pytest finds fixtures by name
)

import cumem
from cumem.compat import torch_memory_saver as module
from cumem.compat.torch_memory_saver import TorchMemorySaver


def test_the_module_has_the_object_that_programs_import() -> None:
    assert isinstance(module.torch_memory_saver, TorchMemorySaver)
    assert module.torch_memory_saver.enabled


def test_pause_gives_memory_back_and_keeps_addresses(
    saver: TorchMemorySaver, driver: DriverUnderTest
) -> None:
    with saver.region():
        tensor = make(40 * MIB)
    address, used = tensor.data_ptr(), driver.used_bytes()
    saver.pause()
    assert used - driver.used_bytes() >= 40 * MIB
    assert not cumem.is_mapped(tensor)
    saver.resume()
    assert tensor.data_ptr() == address
    assert driver.used_bytes() == used
    tensor.fill_(7)
    assert same_bytes(tensor, torch.full((40 * MIB,), 7, dtype=torch.uint8))


def test_tags_pause_and_resume_in_any_order(saver: TorchMemorySaver) -> None:
    tensors = {}
    for seed, tag in enumerate(("first", "second")):
        with saver.region(tag, enable_cpu_backup=True):
            tensors[tag] = make(2 * MIB, seed)
    saver.pause("first")
    saver.pause("second")
    saver.resume("second")
    assert cumem.is_mapped(tensors["second"])
    assert not cumem.is_mapped(tensors["first"])
    saver.resume("first")
    saver.pause("first")
    saver.resume("first")
    assert all(holds_pattern(tensor, seed) for seed, tensor in enumerate(tensors.values()))


def test_repeats_and_unknown_tags_do_nothing(saver: TorchMemorySaver) -> None:
    saver.pause()
    saver.resume()
    with saver.region("weights", enable_cpu_backup=True):
        tensor = make(2 * MIB, 3)
    saver.resume()
    saver.resume("weights")
    saver.pause("weights")
    saver.pause("weights")
    saver.pause()
    saver.pause("nobody")
    saver.resume("nobody")
    assert not cumem.is_mapped(tensor)
    saver.resume()
    saver.resume()
    assert holds_pattern(tensor, 3)


def test_pause_leaves_pools_of_others_alone(saver: TorchMemorySaver) -> None:
    with cumem.use_memory_pool("others"):
        other = make(2 * MIB)
    with saver.region("mine"):
        mine = make(2 * MIB)
    saver.pause()
    saver.pause("others")
    assert cumem.is_mapped(other)
    assert not cumem.is_mapped(mine)


def test_regions_nest(saver: TorchMemorySaver) -> None:
    with saver.region("outer", enable_cpu_backup=True):
        first = make(MIB, 1)
        with saver.region("gradients"):
            inner = make(MIB, 2)
        last = make(MIB, 3)
    assert [cumem.tag_of(tensor) for tensor in (first, inner, last)] == [
        *("outer", "gradients", "outer")
    ]
    saver.pause()
    cumem.wake_up(fill="zero")
    assert holds_pattern(first, 1)
    assert holds_pattern(last, 3)
    assert not raw(inner).any()


def test_what_is_made_while_disabled_is_never_paused(saver: TorchMemorySaver) -> None:
    with saver.region("weights", enable_cpu_backup=True):
        before = make(MIB, 1)
        with saver.disable():
            free = make(MIB, 2)
        after = make(MIB, 3)
    assert cumem.tag_of(free) is None
    assert cumem.tag_of(before) == cumem.tag_of(after) == "weights"
    saver.pause()
    assert cumem.is_mapped(free)
    assert holds_pattern(free, 2)
    saver.resume()
    assert holds_pattern(before, 1)
    assert holds_pattern(after, 3)


def test_a_region_inside_disable_is_paused_again(saver: TorchMemorySaver) -> None:
    with saver.region("outer"):
        outer = make(MIB)
        with saver.disable(), saver.region("inner"):
            tensor = make(MIB)
            with saver.disable():
                free = make(MIB)
    assert (cumem.tag_of(outer), cumem.tag_of(tensor)) == ("outer", "inner")
    assert cumem.tag_of(free) is None


def test_disable_outside_of_regions_changes_nothing(saver: TorchMemorySaver) -> None:
    with saver.disable():
        free = make(MIB)
    assert cumem.tag_of(free) is None


def test_a_margin_of_device_memory_stays_free(
    saver: TorchMemorySaver, driver: DriverUnderTest
) -> None:
    with saver.region():
        first = make(4 * MIB, 1)
    saver.memory_margin_bytes = driver.free_bytes() - 30 * MIB
    assert saver.memory_margin_bytes == cumem._runtime.current_options().memory_margin_bytes
    with saver.region(), pytest.raises(torch.OutOfMemoryError):
        make(60 * MIB)
    with saver.region():
        fits = make(20 * MIB, 2)
    saver.memory_margin_bytes = 0
    with saver.region():
        large = make(60 * MIB, 3)
    assert [holds_pattern(t, s) for s, t in enumerate((first, fits, large), 1)] == [True] * 3


def test_hook_mode_is_torch(saver: TorchMemorySaver) -> None:
    saver.hook_mode = "torch"
    assert saver.hook_mode == "torch"
    with pytest.raises(ValueError, match="choices: 'torch'"):
        saver.hook_mode = "preload"


def test_bad_input_is_an_error_before_anything_changes(saver: TorchMemorySaver) -> None:
    with (
        pytest.raises(ValueError, match="cpu_backup_backend 'mmap'"),
        saver.region(enable_cpu_backup=True, cpu_backup_backend="mmap"),
    ):
        pass
    with (
        pytest.raises(ValueError, match="enable_cpu_backup"),
        saver.region(cpu_backup_backend="pinned"),
    ):
        pass
    with pytest.raises(ValueError, match="negative"):
        saver.memory_margin_bytes = -1
    assert saver.memory_margin_bytes == 0


def test_a_resume_without_memory_loses_nothing(
    saver: TorchMemorySaver, driver: DriverUnderTest
) -> None:
    with saver.region(enable_cpu_backup=True):
        tensor = make(60 * MIB, 4)
    saver.pause()
    with driver.another_tenant(leaves=20 * MIB), pytest.raises(cumem.DeviceOutOfMemoryError):
        saver.resume()
    assert not cumem.is_mapped(tensor)
    saver.resume()
    assert holds_pattern(tensor, 4)


def test_a_pause_inside_a_region_is_refused(saver: TorchMemorySaver) -> None:
    with saver.region("weights", enable_cpu_backup=True):
        tensor = make(MIB, 5)
        with pytest.raises(cumem.BusyError):
            saver.pause("weights")
    assert holds_pattern(tensor, 5)


@pytest.mark.needs("machine without graphs")
def test_a_graph_needs_a_gpu(saver: TorchMemorySaver, driver: DriverUnderTest) -> None:
    assert driver.emulated
    with pytest.raises(cumem.CumemError, match="needs a CUDA device"), saver.cuda_graph(object()):
        pass


def test_a_loop_of_training_and_rollout(saver: TorchMemorySaver, driver: DriverUnderTest) -> None:
    """Weights without backup are paused, loaded anew and used, next to a cache."""
    with saver.region("weights"):
        weights = make(20 * MIB)
    with saver.region("kv_cache"):
        cache = make(40 * MIB)
    where = weights.data_ptr(), cache.data_ptr()
    for step in range(3):
        saver.pause("kv_cache")
        saver.pause("weights")
        trainer = make(20 * MIB, step)
        saver.resume("weights")
        weights.copy_(trainer)
        del trainer
        saver.resume("kv_cache")
        cache.zero_()
        assert holds_pattern(weights, step)
    assert where == (weights.data_ptr(), cache.data_ptr())


def test_a_process_that_is_started_needs_no_preloading() -> None:
    with module.configure_subprocess():
        pass
