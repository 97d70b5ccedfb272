"""Measures how one library loads one file; ``bench_load.py`` starts it.

Its arguments are the library, the file, the number of loads, the file for the result,
options of cumem as JSON, ``warm`` or ``cold``, and how long to rest before each.
What a process does once whatever it loads (a CUDA context, kernels, imports) is done
before the clock starts; pinned memory and caches of the library are not.
"""

from __future__ import annotations

import gc
import json
import sys
import time
from collections.abc import Callable
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from load_files import evict, read_all, same_as_written
from machine import copy_ceiling, describe, synchronize

import cumem

Tensors = dict[str, torch.Tensor]


def _with_cumem(path: str, _device: torch.device) -> Tensors:
    return cumem.load_file(path)


def _with_reads(path: str, _device: torch.device) -> Tensors:
    """No library: what the file system gives to as many threads as a load has."""
    read_all(path)
    return {}


def _with_direct_reads(path: str, _device: torch.device) -> Tensors:
    """The same past the page cache, for what the disk itself gives."""
    read_all(path, direct=True)
    return {}


def _with_safetensors(path: str, device: torch.device) -> Tensors:
    from safetensors.torch import load_file

    return load_file(path, device=str(device))


def _with_fastsafetensors(path: str, device: torch.device) -> Tensors:
    from fastsafetensors import SafeTensorsFileLoader, SingleGroup

    where = str(device) if device.index is not None else f"{device.type}:0"
    loader = SafeTensorsFileLoader(SingleGroup(), where, nogds=True)
    loader.add_filenames({0: [path]})
    buffer = loader.copy_files_to_device()
    return {name: buffer.get_tensor(name) for name in loader.get_keys()}


def _with_runai(path: str, device: torch.device) -> Tensors:
    from runai_model_streamer import SafetensorsStreamer

    with SafetensorsStreamer() as streamer:
        streamer.stream_file(path)
        return {name: tensor.to(device) for name, tensor in streamer.get_tensors()}


LIBRARIES: dict[str, tuple[str, Callable[[str, torch.device], Tensors]]] = {
    "cumem": ("cumem", _with_cumem),
    "safetensors": ("safetensors", _with_safetensors),
    "fastsafetensors": ("fastsafetensors", _with_fastsafetensors),
    "runai": ("runai-model-streamer", _with_runai),
    "reads": ("cumem", _with_reads),
    "direct-reads": ("cumem", _with_direct_reads),
}


class Loads:
    """Loads of one file by one library, timed and checked."""

    def __init__(self, path: str, device: torch.device, *, cold: bool, rest: float) -> None:
        self._path, self._device, self._cold, self._rest = path, device, cold, rest
        self.rows: dict[str, list[float]] = {}

    def timed(self, row: str, call: Callable[[], Any]) -> Any:
        if self._cold:
            evict(self._path)
        synchronize(self._device)
        time.sleep(self._rest)  # the driver scrubs what was released
        started = time.perf_counter()
        result = call()
        synchronize(self._device)
        self.rows.setdefault(row, []).append(time.perf_counter() - started)
        return result

    def load(self, library: str, count: int) -> None:
        for index in range(count):
            row = "again" if index else "first"
            tensors = self.timed(row, lambda: LIBRARIES[library][1](self._path, self._device))
            if tensors:
                self._check(tensors, library)
            del tensors
            gc.collect()

    def reload(self, count: int) -> dict[str, int]:
        """Sleeps and wakes of memory that comes from its file."""
        tensors = cumem.load_file(self._path, on_sleep="reload")
        memory = {
            "device_bytes": cumem.stats().segment_bytes,
            "payload_bytes": sum(tensor.nbytes for tensor in tensors.values()),
        }
        for _ in range(count):
            self.timed("reload: sleep", cumem.sleep)
            self.timed("reload: wake", cumem.wake_up)
            self._check(tensors, "reload")
        return {**memory, "host_bytes": cumem.stats().host_bytes}

    def reload_pinned(self, count: int) -> int:
        """The same from the file's own pages, which stay pinned; returns their bytes."""
        load = partial(cumem.load_file, self._path, on_sleep="reload", pin_file=True)
        tensors = self.timed("pinned file: load", load)
        for _ in range(count):
            self.timed("pinned file: sleep", cumem.sleep)
            self.timed("pinned file: wake", cumem.wake_up)
            self._check(tensors, "pinned file")
        return cumem.stats().pinned_file_bytes

    def _check(self, tensors: Tensors, what: str) -> None:
        if not same_as_written(tensors):
            raise SystemExit(f"{what}: the contents are not those of the file")


def _prepare(device: torch.device) -> None:
    with cumem.use_memory_pool("warm-up"):
        warm = torch.zeros(1, device=device)
    del warm
    cumem.trim("warm-up")
    synchronize(device)


def measure(library: str, path: str, count: int, *, cold: bool, rest: float) -> dict[str, Any]:
    device = cumem.default_device()
    package = LIBRARIES[library][0]
    _prepare(device)
    loads = Loads(path, device, cold=cold, rest=rest)
    loads.load(library, count)
    memory = loads.reload(count) if library == "cumem" else {}
    if library == "cumem" and not cold:  # what is pinned is never cold
        memory["pinned_file_bytes"] = loads.reload_pinned(count)
    return {
        "library": library,
        "version": cumem.__version__ if package == "cumem" else version(package),
        "environment": describe(device),
        "rows": loads.rows,
        "memory": memory,
        "ceiling_gb_per_s": copy_ceiling(device).get("h2d_gb_per_s", 0.0),
    }


def main() -> None:
    library, path, count, result, options, state, rest = sys.argv[1:]
    cumem.configure(cumem.Options(**json.loads(options)))
    try:
        found = measure(library, path, int(count), cold=state == "cold", rest=float(rest))
    except (ImportError, OSError) as error:  # direct reads: not on every file system
        found = {"library": library, "unavailable": str(error)}
    Path(result).write_text(json.dumps(found), encoding="utf-8")


if __name__ == "__main__":
    main()
