"""On which machine was it measured, and how fast is a plain copy there?"""

from __future__ import annotations

import os
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
from settings import GIB, MIB

_BUFFER = GIB
_COPY = 64 * MIB  # one copy; above 20 MiB the link is at its limit
_ROUNDS = 4  # buffers a sample
_SAMPLES = 5

_SMI_FIELDS = "name,driver_version,pcie.link.gen.max,pcie.link.width.max"


def synchronize(device: torch.device) -> None:
    """Waits for all work of ``device``."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def describe(device: torch.device) -> dict[str, Any]:
    """Versions and hardware, for the results."""
    facts: dict[str, Any] = {
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.machine()}",
        "processors": os.cpu_count(),
        "emulated": device.type != "cuda",
    }
    if device.type == "cuda":
        facts |= {"gpu": torch.cuda.get_device_name(device), "link": _smi()}
        facts["gpu_gib"] = round(torch.cuda.get_device_properties(device).total_memory / GIB, 1)
    return facts


def _smi() -> dict[str, str]:
    """What nvidia-smi says of driver and bus; empty where there is none."""
    command = ["nvidia-smi", f"--query-gpu={_SMI_FIELDS}", "--format=csv,noheader"]
    try:
        answer = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    except (OSError, subprocess.SubprocessError):
        return {}
    values = answer.stdout.splitlines()[0].split(",")
    return dict(zip(_SMI_FIELDS.split(","), (value.strip() for value in values), strict=False))


def pretouch(count: int) -> float:
    """Touches ``count`` bytes of new host memory and frees them; returns the seconds.

    Where the host's memory is given to it only at first touch (a small virtual
    machine that grows, for one), this keeps that cost out of what is measured.
    """
    started = time.perf_counter()
    held = []
    while count > 0:
        size = min(count, GIB)
        held.append(torch.empty(size, dtype=torch.uint8).fill_(1))
        count -= size
    held.clear()
    return time.perf_counter() - started


def copy_ceiling(device: torch.device, *, both: bool = False) -> dict[str, float]:
    """GB/s of plain copies between pinned buffers of 1 GiB and the device.

    Copies of 64 MiB, enqueued back to back, 4 GiB a sample and direction, one wait at
    the end; the median of the samples. Empty under the emulator, which has no speed.

    Args:
        both: also with both directions at once, on a stream each; their sum.
    """
    if device.type != "cuda":
        return {}
    result = _one_way(device)
    if both:
        result["both_gb_per_s"] = _both_ways(device)
    torch.cuda.empty_cache()
    torch._C._host_emptyCache()
    return result


def _one_way(device: torch.device) -> dict[str, float]:
    host, memory = _buffers(device)
    return {
        "d2h_gb_per_s": _speed(lambda: _copy_all(host, memory), device),
        "h2d_gb_per_s": _speed(lambda: _copy_all(memory, host), device),
    }


def _both_ways(device: torch.device) -> float:
    out, back = _buffers(device), _buffers(device)
    streams = torch.cuda.Stream(device), torch.cuda.Stream(device)

    def copy() -> None:
        with torch.cuda.stream(streams[0]):
            _copy_all(*out)
        with torch.cuda.stream(streams[1]):
            _copy_all(*reversed(back))

    return 2 * _speed(copy, device)


def _buffers(device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    host = torch.empty(_BUFFER, dtype=torch.uint8, pin_memory=True)
    memory = torch.empty(_BUFFER, dtype=torch.uint8, device=device)
    torch.cuda.synchronize(device)
    return host, memory


def _copy_all(target: torch.Tensor, source: torch.Tensor) -> None:
    for at in [*range(0, _BUFFER, _COPY)] * _ROUNDS:
        target[at : at + _COPY].copy_(source[at : at + _COPY], non_blocking=True)


def _speed(copy: Callable[[], None], device: torch.device) -> float:
    seconds = []
    for _ in range(_SAMPLES + 1):
        started = time.perf_counter()
        copy()
        torch.cuda.synchronize(device)
        seconds.append(time.perf_counter() - started)
    return _BUFFER * _ROUNDS / statistics.median(seconds[1:]) / 1e9  # the first one warms up


if __name__ == "__main__":
    pretouch(int(float(sys.argv[1]) * GIB))
