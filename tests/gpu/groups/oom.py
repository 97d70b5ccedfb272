"""What is left when the device, or the host, has no room?"""

from __future__ import annotations

import torch
from harness import expect, need, note, run
from support import CUDA, DEVICE, GIB, MIB, addresses, fill, holds, intact, make

import cumem

SIZES = (2 * GIB + 3, GIB, 30 * MIB, 5 * MIB, 7)


def free_bytes() -> int:
    return torch.cuda.mem_get_info()[0]


def hog(left: int) -> torch.Tensor:
    """Takes what is free on the device but for ``left`` bytes, outside of cumem."""
    torch.cuda.empty_cache()
    return torch.empty(free_bytes() - left, dtype=torch.uint8, device=DEVICE)


def too_large_an_allocation_is_torchs_error() -> None:
    need(CUDA, "CUDA device")
    total = torch.cuda.mem_get_info()[1]
    failed = cumem.stats().failed_mallocs
    with cumem.use_memory_pool("weights"):
        expect(
            torch.cuda.OutOfMemoryError,
            lambda: torch.empty(2 * total, dtype=torch.uint8, device=DEVICE),
        )
        small = torch.empty(MIB, dtype=torch.uint8, device=DEVICE)
        large = torch.empty(30 * MIB, dtype=torch.uint8, device=DEVICE)
    assert cumem.stats().failed_mallocs > failed
    fill(small, 1)
    fill(large, 2)
    cumem.sleep()
    cumem.wake_up()
    assert holds(small, 1)
    assert holds(large, 2)


def filling_the_device_inside_a_scope() -> None:
    """Allocates until it fails; what was made before the failure is whole."""
    need(CUDA, "CUDA device")
    torch.cuda.empty_cache()
    kept: list[torch.Tensor] = []
    size = free_bytes() // 10 + 64 * MIB  # nine fit, and something smaller beside them

    def allocate_for_ever() -> None:
        while True:
            kept.append(torch.empty(size, dtype=torch.uint8, device=DEVICE))

    with cumem.use_memory_pool("kv_cache"):
        expect(torch.cuda.OutOfMemoryError, allocate_for_ever)
        small = torch.empty(MIB, dtype=torch.uint8, device=DEVICE)
    note(f"{len(kept)} allocations of {size} bytes")
    fill(small, 1)
    before = free_bytes()
    report = cumem.sleep()
    assert free_bytes() - before >= report.freed_bytes - 2 * MIB * (len(kept) + 1)
    cumem.wake_up()
    kept.clear()
    assert cumem.trim("kv_cache") > 0


def wake_without_room_changes_nothing() -> None:
    need(CUDA, "CUDA device")
    tensors = make("weights", SIZES)
    where = addresses(tensors)
    freed = cumem.sleep().freed_bytes
    held = hog(freed // 2)
    free = free_bytes()
    for _ in range(3):
        text = expect(cumem.DeviceOutOfMemoryError, cumem.wake_up)
        assert abs(free_bytes() - free) <= 2 * MIB, "memory was kept by a wake that failed"
        assert cumem.sleeping_tags() == {"weights"}
        assert not any(cumem.is_mapped(tensor) for tensor in tensors)
        cumem.check()
    note(text)
    assert "wake_up" in text
    assert "cuMemCreate" in text
    assert "free" in text
    expect(torch.OutOfMemoryError, cumem.wake_up)
    del held
    torch.cuda.empty_cache()
    cumem.wake_up()
    assert addresses(tensors) == where
    assert intact(tensors)


def what_fits_can_be_woken() -> None:
    need(CUDA, "CUDA device")
    weights = make("weights", SIZES)
    small = make("tables", [30 * MIB])
    cumem.sleep()
    held = hog(GIB)
    expect(cumem.DeviceOutOfMemoryError, cumem.wake_up)
    cumem.wake_up(["tables"])
    assert cumem.sleeping_tags() == {"weights"}
    assert intact(small)
    del held
    torch.cuda.empty_cache()
    cumem.wake_up()
    assert intact(weights)
    assert intact(small)


def wake_takes_what_torch_only_caches() -> None:
    need(CUDA, "CUDA device")
    tensors = make("weights", SIZES)
    cumem.sleep()
    held = hog(GIB)
    del held  # torch keeps it in its cache
    assert free_bytes() < 2 * GIB
    cumem.wake_up()
    assert intact(tensors)


def a_scope_opens_on_a_device_that_is_full_of_cached_memory() -> None:
    need(CUDA, "CUDA device")
    held = hog(GIB)
    del held
    with cumem.use_memory_pool("weights"):
        tensor = torch.empty(4 * GIB, dtype=torch.uint8, device=DEVICE)
    assert cumem.tag_of(tensor) == "weights"


def sleep_without_room_on_the_host_changes_nothing() -> None:
    tensors = make("weights", [30 * MIB, 5 * MIB])
    cumem.release_host_memory()
    cumem.configure(cumem.Options(host_limit_bytes=4 * MIB))
    text = expect(cumem.HostOutOfMemoryError, cumem.sleep)
    note(text)
    expect(MemoryError, cumem.sleep)
    assert not cumem.is_sleeping()
    assert all(cumem.is_mapped(tensor) for tensor in tensors)
    assert cumem.stats().host_used_bytes == 0
    cumem.configure(cumem.Options())
    cumem.sleep()
    cumem.wake_up()
    assert intact(tensors)


if __name__ == "__main__":
    run(
        [
            too_large_an_allocation_is_torchs_error,
            filling_the_device_inside_a_scope,
            wake_without_room_changes_nothing,
            what_fits_can_be_woken,
            wake_takes_what_torch_only_caches,
            a_scope_opens_on_a_device_that_is_full_of_cached_memory,
            sleep_without_room_on_the_host_changes_nothing,
        ]
    )
