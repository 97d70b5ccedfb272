"""Does the drop-in keep, show and give back the backups that were asked for?"""

from __future__ import annotations

import pytest
import torch
from support import MIB, holds_pattern, make, make_as, pattern, raw, same_bytes
from torch_memory_saver_support import (
    saver_fixture,  # noqa: F401 - pytest finds fixtures by name
)

import cumem
from cumem.compat.torch_memory_saver import TorchMemorySaver


def test_contents_come_back_only_with_a_backup(saver: TorchMemorySaver) -> None:
    with saver.region("weights", enable_cpu_backup=True):
        kept = make(3 * MIB, 1)
    with saver.region("cache"):
        lost = make(3 * MIB, 2)
    saver.pause()
    cumem.wake_up(fill="poison")
    assert holds_pattern(kept, 1)
    assert same_bytes(lost, torch.full((3 * MIB,), 0xFF, dtype=torch.uint8))


def test_one_tag_may_have_tensors_with_and_without_backup(saver: TorchMemorySaver) -> None:
    with saver.region(enable_cpu_backup=True):
        kept = make(MIB, 1)
    with saver.region(enable_cpu_backup=False):
        lost = make(MIB, 2)
    saver.pause("default")
    cumem.wake_up(fill="zero")
    assert holds_pattern(kept, 1)
    assert not raw(lost).any()


@pytest.mark.parametrize("dtype", [torch.uint8, torch.float32, torch.bfloat16])
def test_a_backup_can_be_read_while_paused(saver: TorchMemorySaver, dtype: torch.dtype) -> None:
    with saver.region(enable_cpu_backup=True):
        before = make(5 * MIB, 1)
        tensor = make_as(dtype, (10, 20, 30), 2)
    expected = raw(tensor).cpu().clone()
    saver.pause()
    copy = saver.get_cpu_backup(tensor)
    assert copy is not None
    assert (copy.device.type, copy.dtype, copy.shape) == ("cpu", dtype, (10, 20, 30))
    assert same_bytes(copy, expected)
    part = saver.get_cpu_backup(before[MIB + 3 : 2 * MIB])
    assert part is not None
    assert same_bytes(part, pattern(5 * MIB, 1)[MIB + 3 : 2 * MIB])
    assert not cumem.is_mapped(tensor)


def test_the_copy_of_a_backup_is_the_callers_own(saver: TorchMemorySaver) -> None:
    with saver.region(enable_cpu_backup=True):
        tensor = make(MIB, 1)
    saver.pause()
    copy = saver.get_cpu_backup(tensor)
    assert copy is not None
    copy.zero_()
    saver.resume()
    assert holds_pattern(tensor, 1)
    tensor.fill_(1)
    saver.pause()
    saver.resume()
    assert not copy.any()


def test_what_is_active_has_no_backup_to_read(saver: TorchMemorySaver) -> None:
    with saver.region(enable_cpu_backup=True):
        tensor = make(MIB)
    assert saver.get_cpu_backup(tensor) is None


def test_reading_a_backup_that_is_not_there_is_an_error(saver: TorchMemorySaver) -> None:
    with saver.region("cache"):
        lost = make(MIB)
    with saver.region("weights", enable_cpu_backup=True):
        kept = make(MIB).view(1024, 1024)
    saver.pause()
    with pytest.raises(cumem.CumemError, match=r"contents of tag 'cache' were"):
        saver.get_cpu_backup(lost)
    with pytest.raises(ValueError, match="not in a pool"):
        saver.get_cpu_backup(make(8))
    with pytest.raises(ValueError, match="not contiguous"):
        saver.get_cpu_backup(kept.t())
    with pytest.raises(ValueError, match="zero_copy"):
        saver.get_cpu_backup(kept, zero_copy=True)


def test_host_memory_is_kept_only_where_that_is_wanted(saver: TorchMemorySaver) -> None:
    with saver.region(enable_cpu_backup=True):
        tensor = make(6 * MIB, 1)
    assert saver.retain_cpu_backup
    saver.pause()
    saver.resume()
    assert cumem.stats().host_bytes >= 6 * MIB
    saver.retain_cpu_backup = False
    assert not saver.retain_cpu_backup
    saver.pause()
    assert cumem.stats().host_bytes >= 6 * MIB
    saver.resume()
    assert cumem.stats().host_bytes == 0
    assert holds_pattern(tensor, 1)
