"""Does the driver agree about addresses, mappings and free memory, asleep and awake?"""

from __future__ import annotations

import cuda_oracle as oracle
import torch
from harness import need, note, run
from support import (
    CUDA,
    DEVICE,
    GIB,
    GRANULE,
    KIB,
    MIB,
    addresses,
    expected_bytes,
    intact,
    make,
    scaled,
)

import cumem

# One in a shared small segment, one in a shared large one, one of several chunks.
SIZES = (KIB, 5 * MIB, scaled(700 * MIB) + 3)


def places(tensor: torch.Tensor) -> list[int]:
    """Addresses all over a tensor: its ends, and one in every chunk between."""
    start, size = tensor.data_ptr(), tensor.numel()
    return sorted({*range(start, start + size, 64 * MIB), start + size - 1})


def mapped(tensors: list[torch.Tensor]) -> set[bool]:
    return {oracle.is_mapped(at) for tensor in tensors for at in places(tensor)}


def backed(tensors: list[torch.Tensor]) -> set[bool]:
    return {oracle.has_handle(at) for tensor in tensors for at in places(tensor)}


def addresses_and_ranges_stay() -> None:
    tensors = make("weights", SIZES)
    where = addresses(tensors)
    ranges = [oracle.reservation(at) for at in where]
    for tensor, found in zip(tensors, ranges, strict=True):
        assert found is not None
        assert found[0] <= tensor.data_ptr()
        assert tensor.data_ptr() + tensor.numel() <= sum(found)
    for _ in range(3):
        cumem.sleep()
        assert addresses(tensors) == where
        asleep = [oracle.reservation(at) for at in where]
        # A driver may refuse to speak of addresses without memory, but not say others.
        assert all(now in (None, before) for now, before in zip(asleep, ranges, strict=True))
        cumem.wake_up()
        assert addresses(tensors) == where
        assert [oracle.reservation(at) for at in where] == ranges
    note(f"address ranges of {SIZES} bytes: {ranges}; asleep: {asleep}")


def reservations_are_torch_segments() -> None:
    need(CUDA, "CUDA device")
    tensors = make("weights", SIZES)
    segments = [
        (segment["address"], segment["total_size"])
        for segment in torch.cuda.memory_snapshot(include_traces=False)
    ]
    for tensor in tensors:
        assert oracle.reservation(tensor.data_ptr()) in segments


def memory_is_there_exactly_when_awake() -> None:
    tensors = make("weights", SIZES)
    assert mapped(tensors) == {True}
    assert backed(tensors) == {True}
    for _ in range(3):
        cumem.sleep()
        assert mapped(tensors) == {False}
        assert backed(tensors) == {False}
        cumem.wake_up()
        assert mapped(tensors) == {True}
        assert backed(tensors) == {True}
    assert intact(tensors)


def only_the_chosen_tags_lose_their_memory() -> None:
    weights = make("weights", SIZES)
    cache = make("kv_cache", SIZES)
    outside = torch.empty(4 * MIB, dtype=torch.uint8, device=DEVICE)
    cumem.sleep(tags=["kv_cache"])
    assert mapped(weights) == {True}
    assert mapped(cache) == {False}
    cumem.sleep()
    assert mapped(weights) == {False}
    cumem.wake_up(["kv_cache"])
    assert mapped(weights) == {False}
    assert mapped(cache) == {True}
    cumem.wake_up()
    if CUDA:  # elsewhere it is memory of the host
        assert oracle.is_mapped(outside.data_ptr())
    assert intact(weights)


def address_range_is_known_when_awake() -> None:
    tensors = make("weights", SIZES)
    before = [oracle.address_range(at) for at in addresses(tensors)]
    cumem.sleep()
    cumem.wake_up()
    assert [oracle.address_range(at) for at in addresses(tensors)] == before
    for tensor, (start, size) in zip(tensors, before, strict=True):
        assert start <= tensor.data_ptr() < start + size
    note(f"cuMemGetAddressRange of {SIZES} bytes: {[size for _, size in before]}")


def memory_lies_where_it_should_and_can_be_shared() -> None:
    need(CUDA, "CUDA device")
    tensors = make("weights", SIZES)
    for _ in range(2):
        for tensor in tensors:
            assert oracle.home_of(tensor.data_ptr()) == tensor.get_device()
            if oracle.offers_posix_handles():
                assert oracle.has_posix_handle(tensor.data_ptr())
        cumem.sleep()
        cumem.wake_up()


def rdma_capability_is_that_of_the_device() -> None:
    need(CUDA, "CUDA device")
    tensors = make("weights", SIZES)
    offered = oracle.offers_rdma()
    note(f"the device {'offers' if offered else 'does not offer'} GPUDirect RDMA for this memory")
    for _ in range(2):
        assert {oracle.is_rdma_capable(at) for at in addresses(tensors)} == {offered}
        cumem.sleep()
        cumem.wake_up()
    assert {oracle.is_rdma_capable(at) for at in addresses(tensors)} == {offered}


def free_memory_moves_by_what_the_reports_say() -> None:
    tensors = make("weights", (*SIZES, scaled(GIB)))
    make("kv_cache", SIZES)
    cumem.sleep()
    cumem.wake_up()  # what is set up once is set up now
    segments = cumem.stats().tags
    slack = GRANULE * sum(tag.segments for tag in segments)
    before = oracle.free_bytes()
    slept = cumem.sleep()
    asleep = oracle.free_bytes()
    woken = cumem.wake_up()
    awake = oracle.free_bytes()
    assert abs((asleep - before) - slept.freed_bytes) <= slack
    assert abs((asleep - awake) - woken.mapped_bytes) <= slack
    assert slept.freed_bytes >= sum(tensor.numel() for tensor in tensors)
    assert slept.freed_bytes == woken.mapped_bytes
    note(f"freed {slept.freed_bytes}, the driver says {asleep - before}")


def repeats_change_nothing() -> None:
    tensors = make("weights", SIZES)
    cumem.sleep()
    asleep = oracle.free_bytes()
    assert cumem.sleep().freed_bytes == 0
    assert oracle.free_bytes() == asleep
    cumem.wake_up()
    awake = oracle.free_bytes()
    assert cumem.wake_up().mapped_bytes == 0
    assert oracle.free_bytes() == awake
    assert intact(tensors)


def the_driver_reads_the_same_bytes() -> None:
    tensors = make("weights", SIZES)
    cumem.sleep()
    cumem.wake_up()
    for seed, tensor in enumerate(tensors):
        count = min(tensor.numel(), 8 * MIB)
        assert oracle.read(tensor.data_ptr(), count) == expected_bytes(count, seed)


if __name__ == "__main__":
    torch.empty(1, device=DEVICE)  # torch makes its context current
    oracle.prepare()
    run(
        [
            addresses_and_ranges_stay,
            reservations_are_torch_segments,
            memory_is_there_exactly_when_awake,
            only_the_chosen_tags_lose_their_memory,
            address_range_is_known_when_awake,
            memory_lies_where_it_should_and_can_be_shared,
            rdma_capability_is_that_of_the_device,
            free_memory_moves_by_what_the_reports_say,
            repeats_change_nothing,
            the_driver_reads_the_same_bytes,
        ]
    )
