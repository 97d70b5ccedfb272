"""Is work that is still under way on any stream respected by sleep, wake and free?"""

from __future__ import annotations

import cuda_oracle as oracle
import torch
from harness import need, run
from support import CUDA, DEVICE, MIB, fill, holds, make, raw

import cumem

# Long enough that whatever does not wait is done before: about a third of a second.
LONG = 600_000_000
SHORT = 20_000_000
SIZE = 64 * MIB


def other_stream() -> torch.cuda.Stream:
    need(CUDA, "CUDA device")
    return torch.cuda.Stream()


def foreign_stream() -> torch.cuda.Stream:
    """A non-blocking stream that torch did not make."""
    need(CUDA, "CUDA device")
    return torch.cuda.ExternalStream(oracle.new_stream(), device=torch.cuda.current_device())


def add_late(tensor: torch.Tensor, stream: torch.cuda.Stream) -> None:
    """Adds one to every byte on ``stream``, after a long kernel; returns at once."""
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        torch.cuda._sleep(LONG)
        raw(tensor).add_(1)


def holds_one_more(tensor: torch.Tensor, seed: int) -> bool:
    return holds(raw(tensor).clone().sub_(1), seed)


def pending_work_is_in_the_backup(stream: torch.cuda.Stream) -> None:
    tensor = make("weights", [SIZE])[0]
    fill(tensor, 4)
    raw(tensor).add_(0)  # the kernel is loaded before the clock runs
    torch.cuda.synchronize()
    add_late(tensor, stream)
    report = cumem.sleep()
    assert report.copied_bytes >= SIZE
    cumem.wake_up()
    assert holds_one_more(tensor, 4)


def pending_work_of_a_side_stream_is_in_the_backup() -> None:
    pending_work_is_in_the_backup(other_stream())


def pending_work_of_a_foreign_stream_is_in_the_backup() -> None:
    pending_work_is_in_the_backup(foreign_stream())


def pending_work_of_the_default_stream_is_in_the_backup() -> None:
    need(CUDA, "CUDA device")
    pending_work_is_in_the_backup(torch.cuda.default_stream())


def discard_waits_for_pending_work() -> None:
    """Without a copy there is nothing else that would wait before the unmap."""
    for stream in (other_stream(), foreign_stream()):
        tensor = make("kv_cache", [SIZE])[0]
        add_late(tensor, stream)
        cumem.sleep()
        cumem.wake_up()
        fill(tensor, 1)
        torch.cuda.synchronize()  # an illegal address would show here
        assert holds(tensor, 1)


def copy_to_the_host_in_flight_at_sleep_arrives_whole() -> None:
    stream = other_stream()
    tensor = fill(make("weights", [SIZE])[0], 7)
    host = torch.empty(SIZE, dtype=torch.uint8, pin_memory=True)
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        torch.cuda._sleep(LONG)
        host.copy_(tensor, non_blocking=True)
    cumem.sleep(level=2)
    cumem.wake_up(fill="poison")
    torch.cuda.synchronize()
    assert holds(host, 7)
    assert raw(tensor).eq(0xFF).all()


def contents_are_valid_on_every_stream_after_wake() -> None:
    streams = [other_stream(), foreign_stream()]
    tensors = make("weights", [SIZE, SIZE])
    for _ in range(5):
        cumem.sleep()
        cumem.wake_up()
        copies = []
        for stream, tensor in zip(streams, tensors, strict=True):
            with torch.cuda.stream(stream):  # it waits for nothing
                copies.append(tensor.clone())
        torch.cuda.synchronize()
        assert all(holds(copy, seed) for seed, copy in enumerate(copies))


def wake_while_another_stream_works_elsewhere() -> None:
    stream = other_stream()
    tensor = make("weights", [SIZE])[0]
    outside = torch.zeros(SIZE, dtype=torch.uint8, device=DEVICE)
    cumem.sleep()
    add_late(outside, stream)
    cumem.wake_up()
    assert holds(tensor, 0)
    torch.cuda.synchronize()
    assert outside.eq(1).all()


def short_lived_tensors_of_a_tight_loop() -> None:
    need(CUDA, "CUDA device")
    with cumem.use_memory_pool("weights"):
        for _ in range(200):
            torch.randn(2048, 7168, device=DEVICE)
        kept = torch.empty(1, device=DEVICE)
    torch.cuda.synchronize()
    assert cumem.tag_of(kept) == "weights"


def memory_is_freed_only_after_the_kernel_that_uses_it() -> None:
    need(CUDA, "CUDA device")
    results = []
    for seed in range(20):
        tensor = make("churn", [SIZE])[0]
        fill(tensor, seed)
        target = torch.empty_like(tensor)
        torch.cuda._sleep(SHORT)
        target.copy_(tensor)
        del tensor
        assert cumem.trim("churn") >= SIZE  # it goes back to the driver now
        results.append(target)
    torch.cuda.synchronize()
    assert all(holds(target, seed) for seed, target in enumerate(results))


def memory_used_by_a_side_stream_is_freed_only_after_it() -> None:
    stream = other_stream()
    results = []
    for seed in range(20):
        tensor = make("churn", [SIZE])[0]
        fill(tensor, seed)
        target = torch.empty_like(tensor)
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            torch.cuda._sleep(SHORT)
            target.copy_(tensor)
        tensor.record_stream(stream)
        target.record_stream(stream)
        del tensor
        cumem.trim("churn")
        results.append(target)
    torch.cuda.synchronize()
    cumem.trim("churn")
    assert all(holds(target, seed) for seed, target in enumerate(results))
    assert cumem.stats().segment_bytes == 0


if __name__ == "__main__":
    torch.empty(1, device=DEVICE)
    oracle.prepare()
    run(
        [
            pending_work_of_a_side_stream_is_in_the_backup,
            pending_work_of_a_foreign_stream_is_in_the_backup,
            pending_work_of_the_default_stream_is_in_the_backup,
            discard_waits_for_pending_work,
            copy_to_the_host_in_flight_at_sleep_arrives_whole,
            contents_are_valid_on_every_stream_after_wake,
            wake_while_another_stream_works_elsewhere,
            short_lived_tensors_of_a_tight_loop,
            memory_is_freed_only_after_the_kernel_that_uses_it,
            memory_used_by_a_side_stream_is_freed_only_after_it,
        ]
    )
