"""Do several devices stay apart?"""

from __future__ import annotations

import ctypes

import pytest
import torch
from support import GRANULE, MIB, DriverUnderTest, holds_pattern, make, tag_stats

import cumem

pytestmark = pytest.mark.machine(devices=2)


def on(driver: DriverUnderTest, device: int) -> torch.device:
    """Where tensors of a scope on ``device`` are made: cpu tensors go to the scope's device."""
    return torch.device(driver.device.type) if driver.emulated else torch.device("cuda", device)


def build(driver: DriverUnderTest) -> list[torch.Tensor]:
    tensors = []
    for device in range(2):
        with cumem.use_memory_pool("weights", device=device):
            tensors.append(make(20 * MIB, device, device=on(driver, device)))
    return tensors


@pytest.mark.parametrize("how", ["int", "str", "device"])
def test_a_scope_uses_the_memory_of_its_device(driver: DriverUnderTest, how: str) -> None:
    name = f"{driver.device.type}:1"
    device = {"int": 1, "str": name, "device": torch.device(name)}[how]
    with cumem.use_memory_pool("weights", device=device):
        first = make(1000, device=on(driver, 1))  # what a device needs once is there now
    before = [driver.used_bytes(index) for index in range(2)]
    with cumem.use_memory_pool("weights", device=device) as pool:
        tensor = make(20 * MIB, device=on(driver, 1))
    grown = [driver.used_bytes(index) - before[index] for index in range(2)]
    assert grown == [0, 20 * MIB]
    assert pool.device == torch.device(name)
    del tensor, first


def test_one_sleep_covers_all_devices(driver: DriverUnderTest) -> None:
    tensors = build(driver)
    before = [driver.used_bytes(index) for index in range(2)]
    report = cumem.sleep()
    assert report.devices == (0, 1)
    assert report.freed_bytes == 40 * MIB
    assert [before[index] - driver.used_bytes(index) for index in range(2)] == [20 * MIB] * 2
    assert cumem.wake_up().devices == (0, 1)
    assert all(holds_pattern(tensor, seed) for seed, tensor in enumerate(tensors))


def test_the_stats_list_each_device(driver: DriverUnderTest) -> None:
    tensors = build(driver)
    devices = cumem.stats().devices[:2]
    assert [device.device for device in devices] == [f"{driver.device.type}:{n}" for n in range(2)]
    assert [device.mapped_bytes for device in devices] == [20 * MIB] * 2
    assert tag_stats("weights").segments == 2
    del tensors


def test_a_pool_is_of_one_device(driver: DriverUnderTest) -> None:
    tensors, ids = [], set()
    for device in (0, 1, 0, 1):
        with cumem.use_memory_pool("weights", device=device) as pool:
            tensors.append(make(100, device=on(driver, device)))
            ids.add((device, pool.id))
    assert len(ids) == 2
    del tensors


@pytest.mark.needs("second tenant on a device of choice")
def test_a_wake_that_one_device_has_no_room_for_wakes_nothing_on_the_other(
    driver: DriverUnderTest,
) -> None:
    tensors = build(driver)
    cumem.sleep()
    with driver.another_tenant(leaves=GRANULE):
        used = [driver.used_bytes(index) for index in range(2)]
        with pytest.raises(cumem.DeviceOutOfMemoryError, match=":0"):
            cumem.wake_up()
        assert [driver.used_bytes(index) for index in range(2)] == used
    cumem.wake_up()
    assert all(holds_pattern(tensor, seed) for seed, tensor in enumerate(tensors))


@pytest.mark.needs("plugin call without a tensor")
def test_memory_of_a_device_belongs_to_the_innermost_scope_of_that_device() -> None:
    from cumem import _C

    plugin = ctypes.CDLL(_C.__file__)
    plugin.cumem_malloc.restype = ctypes.c_void_p
    plugin.cumem_malloc.argtypes = (ctypes.c_ssize_t, ctypes.c_int, ctypes.c_void_p)
    plugin.cumem_free.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_void_p)
    cumem.configure(cumem.Options(warn_empty_scope=False))
    with cumem.use_memory_pool("outer", device=0), cumem.use_memory_pool("inner", device=1):
        address = plugin.cumem_malloc(GRANULE, 0, None)
    owner = _C.current().owner_of(address)
    plugin.cumem_free(address, GRANULE, 0, None)
    assert owner.tag == "outer"
