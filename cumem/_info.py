"""What does this machine support, and why not?

``python -m cumem info``: one screen.
"""

from __future__ import annotations

import os
import platform
import resource
from collections.abc import Iterator
from pathlib import Path

import torch

import cumem
from cumem import _C, _runtime, _torch
from cumem import _host_memory as host_memory
from cumem._runtime import Runtime
from cumem._text import size
from cumem.errors import CumemError

_PROBE_TAG = "info"
_PROBE_BYTES = 2 << 20
_KERNEL_MODULE = Path("/proc/driver/nvidia/version")
_LIBRARIES = Path("/proc/self/maps")
_HUGE_PAGES = Path("/sys/kernel/mm/transparent_hugepage/enabled")
_NODES = Path("/sys/devices/system/node")


def lines(runtime: Runtime, why: str) -> Iterator[str]:
    """The screen, line by line.

    Tries a sleep and a wake of 2 MiB on the current device; nothing of it is left.

    Args:
        runtime: what is used.
        why: why this driver and no other, as a clause.
    """
    missing: list[str] = []
    sections = {
        "versions": _versions(),
        "driver": _driver(runtime, why),
        **{
            runtime.device_name(device): _device(runtime, device, missing)
            for device in range(runtime.backend.device_count())
        },
        "host": _host(missing),
        "sleep": _trial(missing),
        "torch": _allocator_settings(),
    }
    if runtime.emulated:
        missing.insert(0, "GPU memory: the driver is emulated, tensors are in host memory")
    sections["missing"] = missing or ["nothing"]
    for label, texts in sections.items():
        for text in texts:
            yield f"{label:<10}{text}"
            label = ""


def _versions() -> list[str]:
    built_for = f"CUDA {torch.version.cuda}" if torch.version.cuda else "no CUDA"
    return [
        f"cumem {cumem.__version__}, torch {torch.__version__} ({built_for}), "
        f"Python {platform.python_version()}, {platform.system()} on {platform.machine()}"
    ]


def _driver(runtime: Runtime, why: str) -> list[str]:
    version = runtime.driver.version
    kind = "emulated" if runtime.emulated else "NVIDIA"
    interface = f"CUDA {version // 1000}.{version % 1000 // 10}"
    module = "" if runtime.emulated else _kernel_module()
    return [f"{kind}, {interface}, {_loaded_from(runtime.driver.path)}{module}", f"because {why}"]


def _loaded_from(path: str) -> str:
    """The file behind a library's name in this process; its version may be another."""
    stem = Path(path).name.partition(".so")[0] + ".so"
    found = [line.split()[-1] for line in _read(_LIBRARIES).splitlines() if f"/{stem}" in line]
    return found[0] if found else path


def _kernel_module() -> str:
    words = _read(_KERNEL_MODULE).split()
    numbers = [word for word in words if word[0].isdigit() and "." in word]
    return f", kernel module {numbers[0]}" if numbers else ""


def _device(runtime: Runtime, device: int, missing: list[str]) -> list[str]:
    name = runtime.device_name(device)
    try:
        info = runtime.allocator.device_info(device)
    except _C.StatusError as error:
        missing.append(f"{name}: cumem cannot use it ({error.call}: {error.code_name or error})")
        return ["virtual memory management no, or the device cannot be opened"]
    # Each with: does it work, does the driver say so.
    tried = {
        "POSIX file descriptors": (info.posix_handle, info.posix_handle_offered),
        "GPUDirect RDMA": (info.gpu_direct_rdma, info.gpu_direct_rdma_offered),
    }
    if runtime.backend.device_count() > 1:
        tried["access from peers"] = (info.peers > 0, False)
    missing += [
        f"{feature} on {name}: {'refused when it was tried' if offered else 'not offered'}"
        for feature, (works, offered) in tried.items()
        if not works
    ]
    features = ", ".join(f"{feature} {_yes(works)}" for feature, (works, _) in tried.items())
    return [
        f"{info.name}, {size(info.free_bytes)} free of {size(info.total_bytes)}, "
        f"granularity {size(info.granularity)}",
        f"virtual memory management yes, {features}, peers {info.peers}",
    ]


def _host(missing: list[str]) -> list[str]:
    huge_pages = _read(_HUGE_PAGES).strip() or "unknown to this kernel"
    if "[never]" in huge_pages:
        missing.append(f"huge pages: switched off in {_HUGE_PAGES}; a first sleep is slower")
    nodes = sum(1 for _ in _NODES.glob("node[0-9]*")) or 1
    processors = len(os.sched_getaffinity(0))
    return [
        f"{size(_C.available_host_bytes())} available, {processors} processor(s), "
        f"{nodes} NUMA node(s)",
        f"transparent huge pages: {huge_pages}; memlock limit: {_memlock()}",
    ]


def _memlock() -> str:
    limit, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    return "none" if limit == resource.RLIM_INFINITY else size(limit)


def _trial(missing: list[str]) -> list[str]:
    """What happens when memory really goes to sleep, and whether its backup was pinned."""
    try:
        same, report, huge_bytes = _sleep_and_wake()
    except (CumemError, torch.OutOfMemoryError) as error:
        missing.append(f"sleep and wake: {error}")
        return ["failed"]
    if not same:
        missing.append("sleep and wake: the contents came back changed; please report this")
    wanted = _runtime.current_options().pin_backups
    if report.pageable_bytes and wanted:
        missing.append("pinned host memory: the driver refused; copies are slower without it")
    pinned = "works" if not report.pageable_bytes else "refused" if wanted else "not wanted"
    outcome = "came back bit for bit" if same else "CHANGED"
    return [
        f"{size(_PROBE_BYTES)} tried: {outcome}; pinning host memory {pinned}",
        f"host memory held: {size(report.host_bytes)}, of it on huge pages {size(huge_bytes)}",
    ]


def _sleep_and_wake() -> tuple[bool, cumem.SleepReport, int]:
    with cumem.use_memory_pool(_PROBE_TAG):
        probe = torch.arange(_PROBE_BYTES // 4, dtype=torch.int32, device=cumem.default_device())
    before = probe.cpu().clone()
    report = cumem.sleep(tags=[_PROBE_TAG])
    huge_bytes = host_memory.huge_bytes(_runtime.current())
    cumem.wake_up([_PROBE_TAG])
    same = torch.equal(before, probe.cpu())
    del probe
    cumem.trim(_PROBE_TAG)
    return same, report, huge_bytes


def _allocator_settings() -> list[str]:
    settings = _torch.allocator_settings()
    expandable = "on, but off inside a scope" if _torch.has_expandable_segments(settings) else "off"
    return [f"allocator settings: {settings or 'none'}; expandable segments {expandable}"]


def _yes(there: bool) -> str:  # noqa: FBT001 - the value that is put into words
    return "yes" if there else "no"


def _read(file: Path) -> str:
    """A file of the kernel's; empty where there is none."""
    try:
        return file.read_text()
    except OSError:
        return ""
