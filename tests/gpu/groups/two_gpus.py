"""Do pools on several devices stay apart, and do copies between devices work after a wake?"""

from __future__ import annotations

import functools

import cuda_oracle as oracle
import torch
from harness import need, run
from support import CUDA, MIB, fill, holds, in_thread

import cumem

SIZE = 40 * MIB + 3


def need_two() -> None:
    need(CUDA and torch.cuda.device_count() >= 2, "second CUDA device")


def fresh(device: int, size: int = SIZE) -> torch.Tensor:
    return torch.empty(size, dtype=torch.uint8, device=f"cuda:{device}")


def on_both(tag: str = "weights") -> list[torch.Tensor]:
    """One tensor in a pool on each device, filled with contents of its ordinal."""
    tensors = []
    for device in (0, 1):
        with cumem.use_memory_pool(tag, device=device):
            tensors.append(fresh(device))
    for device, tensor in enumerate(tensors):
        fill(tensor, device)
    return tensors


def copies_arrive(tensors: list[torch.Tensor]) -> None:
    """Both ways, into pool tensors and into others."""
    for source, target in ((0, 1), (1, 0)):
        assert holds(tensors[source].to(f"cuda:{target}"), source)
        tensors[target].copy_(tensors[source])
        torch.cuda.synchronize(0)
        torch.cuda.synchronize(1)
        assert holds(tensors[target], source)
        fill(tensors[target], target)


def copies_between_devices_before_and_after_a_wake() -> None:
    need_two()
    tensors = on_both()
    copies_arrive(tensors)
    for _ in range(3):
        cumem.sleep()
        cumem.wake_up()
        copies_arrive(tensors)


def peers_may_reach_the_memory() -> None:
    need_two()
    need(torch.cuda.can_device_access_peer(0, 1), "peer access between the devices")
    tensors = on_both()
    for _ in range(2):
        for device, tensor in enumerate(tensors):
            for other in (0, 1):
                assert oracle.access_from(other, tensor.data_ptr()) == "READWRITE", (device, other)
        cumem.sleep()
        cumem.wake_up()


def each_device_has_pools_of_its_own() -> None:
    need_two()
    tensors = on_both()
    report = cumem.sleep()
    assert report.devices == (0, 1)
    free = [torch.cuda.mem_get_info(device)[0] for device in (0, 1)]
    woken = cumem.wake_up()
    assert woken.devices == (0, 1)
    for device in (0, 1):
        assert free[device] - torch.cuda.mem_get_info(device)[0] >= SIZE
    assert holds(tensors[0], 0)
    assert holds(tensors[1], 1)
    assert [stats.device for stats in cumem.stats().devices] == ["cuda:0", "cuda:1"]


def a_scope_captures_on_its_device_only() -> None:
    need_two()
    with cumem.use_memory_pool("weights", device=1) as pool:
        inside, outside = fresh(1), fresh(0)
    assert pool.device == torch.device("cuda", 1)
    assert cumem.tag_of(inside) == "weights"
    assert cumem.tag_of(outside) is None
    with torch.cuda.device(1), cumem.use_memory_pool("weights"):
        inside, outside = fresh(1), fresh(0)
    assert cumem.tag_of(inside) == "weights"
    assert cumem.tag_of(outside) is None
    fill(outside, 5)
    cumem.sleep()
    assert holds(outside, 5)
    assert not cumem.is_mapped(inside)


def nested_scopes_on_two_devices() -> None:
    need_two()
    with (
        cumem.use_memory_pool("weights", device=0),
        cumem.use_memory_pool("kv_cache", device=1, on_sleep="offload"),
    ):
        first, second = fresh(0), fresh(1)
    assert [cumem.tag_of(first), cumem.tag_of(second)] == ["weights", "kv_cache"]
    fill(first, 3)
    fill(second, 4)
    cumem.sleep(tags=["kv_cache"])
    assert cumem.is_mapped(first)
    assert not cumem.is_mapped(second)
    cumem.sleep()
    cumem.wake_up()
    assert holds(first, 3)
    assert holds(second, 4)


def the_current_device_is_unchanged() -> None:
    need_two()
    tensors = on_both()
    for current in (0, 1):
        with torch.cuda.device(current):
            torch.empty(1, device="cuda")
            before = oracle.current_context()
            for call in (cumem.sleep, cumem.stats, cumem.check, cumem.wake_up, cumem.trim):
                call()
                assert torch.cuda.current_device() == current
                assert oracle.current_context() == before
    assert holds(tensors[0], 0)
    assert holds(tensors[1], 1)


def pending_work_of_every_device_is_in_the_backup() -> None:
    need_two()
    tensors = on_both()
    for device, tensor in enumerate(tensors):
        with torch.cuda.device(device), torch.cuda.stream(torch.cuda.Stream(device)):
            torch.cuda.current_stream().wait_stream(torch.cuda.default_stream(device))
            torch.cuda._sleep(600_000_000)
            tensor.add_(1)
    cumem.sleep()
    cumem.wake_up()
    assert all(holds(tensor.sub(1), device) for device, tensor in enumerate(tensors))


def frees_on_another_device_than_the_current_one() -> None:
    need_two()
    tensors = on_both("churn")
    free = [torch.cuda.mem_get_info(device)[0] for device in (0, 1)]
    with torch.cuda.device(0):
        tensors.clear()
        assert cumem.trim("churn") >= 2 * SIZE
    for device in (0, 1):
        assert torch.cuda.mem_get_info(device)[0] - free[device] >= SIZE


def threads_on_their_own_devices() -> None:
    need_two()
    made: dict[int, torch.Tensor] = {}

    def work(device: int) -> None:
        torch.cuda.set_device(device)
        with cumem.use_memory_pool("weights"):
            made[device] = torch.empty(SIZE, dtype=torch.uint8, device="cuda")

    for device in (0, 1):
        in_thread(functools.partial(work, device))
        assert made[device].get_device() == device
        assert cumem.tag_of(made[device]) == "weights"
        fill(made[device], device)
    cumem.sleep()
    cumem.wake_up()
    assert all(holds(tensor, device) for device, tensor in made.items())


if __name__ == "__main__":
    run(
        [
            copies_between_devices_before_and_after_a_wake,
            peers_may_reach_the_memory,
            each_device_has_pools_of_its_own,
            a_scope_captures_on_its_device_only,
            nested_scopes_on_two_devices,
            the_current_device_is_unchanged,
            pending_work_of_every_device_is_in_the_backup,
            frees_on_another_device_than_the_current_one,
            threads_on_their_own_devices,
        ]
    )
