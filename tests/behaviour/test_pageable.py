"""Do backups sleep and wake in host memory that is not pinned?"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from support import MIB, DriverUnderTest, fill_pattern, holds_pattern, make, state

import cumem

SIZES = (100, 5000, 3 * MIB + 1, 7 * MIB + 12345)


@pytest.fixture(autouse=True)
def unpinned() -> Iterator[None]:
    cumem.configure(
        cumem.Options(pin_backups=False, load_buffer_bytes=MIB, load_ring_bytes=3 * MIB)
    )
    yield
    cumem.configure(cumem.Options())


def test_backups_are_not_pinned_by_choice_and_every_report_says_so() -> None:
    with cumem.use_memory_pool("weights"):
        tensors = [make(size, size) for size in SIZES]
    for _ in range(2):
        slept = cumem.sleep()
        assert slept.pageable_bytes == cumem.stats().pageable_bytes >= slept.offloaded_bytes
        assert "pageable" in str(slept)
        report = cumem.report()
        assert 0 < report.pinned_bytes == report.host_bytes - slept.pageable_bytes <= 3 * MIB
        cumem.wake_up()
        assert all(holds_pattern(tensor, tensor.numel()) for tensor in tensors)


def test_verification_and_a_switch_work_on_pageable_backups() -> None:
    tensors = {}
    for tag in ("weights", "draft"):
        with cumem.use_memory_pool(tag):
            tensors[tag] = make(5 * MIB)
    cumem.sleep(tags=["draft"], verify=True)
    cumem.switch(sleep_tags=["weights"], wake_tags=["draft"])
    assert holds_pattern(tensors["draft"])
    cumem.wake_up(verify=True)
    fill_pattern(tensors["weights"], 8)
    cumem.sleep(verify=True)
    cumem.wake_up(wait=False).wait()
    assert holds_pattern(tensors["weights"], 8)
    assert holds_pattern(tensors["draft"])


@pytest.mark.needs("fault injection")
@pytest.mark.parametrize("call", ["cuMemcpyDtoHAsync", "cuEventRecord", "cuEventSynchronize"])
def test_a_sleep_whose_ring_fails_changes_nothing(driver: DriverUnderTest, call: str) -> None:
    with cumem.use_memory_pool("weights"):
        tensor = make(5 * MIB)
    before = state()
    driver.emulator.fail(call, code="CUDA_ERROR_UNKNOWN")
    with pytest.raises(cumem.DriverError, match=call):
        cumem.sleep()
    assert state() == before
    cumem.sleep()
    cumem.wake_up()
    assert holds_pattern(tensor)


@pytest.mark.needs("fault injection")
@pytest.mark.parametrize("call", ["cuMemcpyHtoDAsync", "cuEventCreate", "cuEventRecord"])
def test_a_wake_whose_ring_fails_wakes_nothing(driver: DriverUnderTest, call: str) -> None:
    with cumem.use_memory_pool("weights"):
        tensor = make(5 * MIB)
    cumem.sleep()
    driver.emulator.fail(call, code="CUDA_ERROR_UNKNOWN")
    with pytest.raises(cumem.DriverError, match=call):
        cumem.wake_up()
    assert cumem.sleeping_tags() == {"weights"}
    cumem.wake_up()
    assert holds_pattern(tensor)


@pytest.mark.needs("refusal to pin")
def test_without_pinned_memory_for_the_ring_the_driver_copies(driver: DriverUnderTest) -> None:
    driver.emulator.refuse_pinning()
    with cumem.use_memory_pool("weights"):
        tensor = make(5 * MIB)
    report = cumem.sleep()
    assert report.pageable_bytes == report.host_bytes
    cumem.wake_up()
    assert holds_pattern(tensor)


def test_unpinned_backups_and_none_that_are_pageable_are_a_contradiction() -> None:
    with pytest.raises(ValueError, match="needs allow_pageable=True"):
        cumem.Options(pin_backups=False, allow_pageable=False)


def test_pinned_memory_that_no_backup_may_use_is_not_counted_on() -> None:
    limited = {"host_limit_bytes": 8 * MIB}
    cumem.configure(cumem.Options(**limited))
    cumem.prepare(bytes=8 * MIB, background=False)
    with cumem.use_memory_pool("weights"):
        tensor = make(5 * MIB)
    assert cumem.plan_sleep().host_bytes == 0
    cumem.configure(
        cumem.Options(**limited, pin_backups=False, load_ring_bytes=2 * MIB, load_buffer_bytes=MIB)
    )
    assert cumem.plan_sleep().host_bytes == 5 * MIB
    cumem.prepare(background=False)  # it goes before this fails
    assert cumem.stats().host_bytes == 5 * MIB
    assert cumem.plan_sleep().host_bytes == 0
    assert cumem.sleep().offloaded_bytes == 5 * MIB
    cumem.wake_up()
    assert holds_pattern(tensor)
