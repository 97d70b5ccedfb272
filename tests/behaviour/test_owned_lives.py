"""Does memory of cumem's own go with its last tensor, whatever happens meanwhile?"""

from __future__ import annotations

import gc
import weakref

import pytest
import torch
from owned_support import owned
from support import GRANULE, MIB, DriverUnderTest, holds_pattern, in_thread, run_fresh

import cumem
from cumem import _owned, _runtime


def test_memory_goes_when_the_last_tensor_over_it_dies(driver: DriverUnderTest) -> None:
    before = driver.used_bytes()
    segment = _owned.allocate(4 * MIB, tag="weights")
    first = segment.tensor(torch.uint8, (MIB,))
    second = segment.tensor(torch.uint8, (MIB,), offset=MIB)
    part = second[10:20]
    del segment, first, second
    gc.collect()
    assert driver.used_bytes() - before == 4 * MIB
    del part
    gc.collect()
    assert driver.used_bytes() == before


def test_memory_that_is_asleep_can_be_let_go(driver: DriverUnderTest) -> None:
    tensor = owned(3 * MIB)
    cumem.sleep()
    addresses = cumem.stats().reserved_addresses
    del tensor
    gc.collect()
    assert cumem.stats().reserved_addresses < addresses
    assert cumem.stats().host_used_bytes == 0
    assert cumem.sleeping_tags() == frozenset()


def test_memory_may_be_let_go_by_another_thread(driver: DriverUnderTest) -> None:
    before = driver.used_bytes()
    held = [owned(MIB)]
    in_thread(held.clear)
    gc.collect()
    assert driver.used_bytes() == before


def test_memory_may_be_let_go_while_an_error_is_on_its_way(driver: DriverUnderTest) -> None:
    before = driver.used_bytes()

    def fails() -> None:
        tensor = owned(MIB)
        raise KeyError(tensor.numel())

    with pytest.raises(KeyError, match=str(MIB)):
        fails()
    gc.collect()
    assert driver.used_bytes() == before


@pytest.mark.needs("slow work on request")
def test_memory_is_given_back_after_work_that_uses_it(driver: DriverUnderTest) -> None:
    tensor = owned(MIB)
    driver.emulator.enqueue(write=(tensor.data_ptr(), b"late"), delay=0.05)
    del tensor
    gc.collect()
    assert driver.emulator.ledger()["pending_work"] == 0
    assert driver.used_bytes() == 0


@pytest.mark.needs("captures on request")
def test_memory_let_go_during_a_capture_follows_when_it_ends(driver: DriverUnderTest) -> None:
    tensor = owned(MIB)
    driver.emulator.begin_capture()
    del tensor
    gc.collect()
    assert driver.used_bytes() == GRANULE
    driver.emulator.end_capture()
    other = owned(MIB)
    assert driver.used_bytes() == GRANULE
    assert holds_pattern(other)


def test_memory_keeps_its_machine_until_it_is_let_go(driver: DriverUnderTest) -> None:
    if not driver.emulated:
        pytest.skip("the real driver is one")
    from cumem.testing import emulated_driver

    with emulated_driver() as other:
        tensor = owned(MIB)
        assert _runtime.current() is not None
    assert holds_pattern(tensor)
    assert other.used_bytes() == GRANULE
    alive = weakref.ref(tensor)
    del tensor
    gc.collect()
    assert alive() is None
    assert other.used_bytes() == 0


_AT_EXIT = """
import torch, cumem
from cumem import _owned
segment = _owned.allocate(5000, tag="weights")
tensor = segment.tensor(torch.uint8, (5000,))
tensor.fill_(3)
{before}
module_level = [segment, tensor]
"""


@pytest.mark.parametrize("before", ["", "cumem.sleep()"], ids=["awake", "asleep"])
def test_a_process_ends_without_noise(before: str) -> None:
    run_fresh(_AT_EXIT.format(before=before))


def test_a_forked_child_leaves_it_to_its_parent() -> None:
    code = _AT_EXIT.format(before="") + (
        "import os, gc\n"
        "child = os.fork()\n"
        "if child == 0:\n"
        "    del segment, tensor, module_level\n"
        "    gc.collect()\n"
        "    try:\n"
        "        _owned.allocate(1, tag='weights')\n"
        "    except cumem.DriverError as error:\n"
        "        os._exit(0 if 'fork' in str(error) else 1)\n"
        "    os._exit(2)\n"
        "assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0\n"
        "assert (tensor == 3).all()\n"
        "assert cumem.stats().segment_bytes == 2 << 20\n"
    )
    run_fresh(code)
