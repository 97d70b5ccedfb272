"""Does a real model come back from sleep exactly as it was?

``python -m cumem demo``: a model is built in a pool, filled from safetensors, run, put
to sleep, woken and run again; every address and every bit is compared.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import torch

import cumem
from cumem import _C, _runtime
from cumem._demo_subject import DemoError, Subject
from cumem._text import size
from cumem.errors import translated

Say = Callable[[str], None]

WEIGHTS, CACHE = "weights", "kv_cache"
_MIB = 1 << 20
_COLUMNS = ("live", "reserved", "tracked", "segments", "device used", "host held")


def run(model: str | None, size_bytes: int | None, say: Say) -> int:
    """Runs the demo on the current device.

    Args:
        model: a Hugging Face model folder, ``minilm``, or None for a model of its own.
        size_bytes: weights of the demo's own model; None: what suits the device.
        say: takes a line of output.

    Returns:
        0 when every pointer and every bit was the same, otherwise 1.

    Raises:
        DemoError: it cannot be run like this, or the model is not deterministic.
        CumemError, torch.OutOfMemoryError: what the calls raise that it makes.
    """
    runtime = _runtime.current()
    device = runtime.backend.current_device()
    with translated("demo", "Nothing was changed."):
        info = runtime.allocator.device_info(device)
    subject = choose_subject(model, size_bytes, info, emulated=runtime.emulated)
    say(f"model:  {subject.title}, {size(subject.weight_bytes)}")
    say(
        f"device: {runtime.device_name(device)}, {info.name}, {size(info.free_bytes)} free "
        f"of {size(info.total_bytes)}"
    )
    say("")
    return _Demo(subject, say).run()


def choose_subject(
    model: str | None, size_bytes: int | None, info: _C.DeviceInfo, *, emulated: bool
) -> Subject:
    """The model of a folder, or one of our own of ``size_bytes``.

    Raises:
        DemoError: there is no such folder, or no room for the model.
    """
    subject: Subject
    if model is not None:
        from cumem._demo_folder import FolderModel, find_folder

        subject = FolderModel(find_folder(model))
    else:
        from cumem._demo_llama import LlamaModel

        subject = LlamaModel(size_bytes or _own_size(info, emulated=emulated))
    if subject.weight_bytes * 3 // 2 > info.free_bytes:
        raise DemoError(
            f"weights of {size(subject.weight_bytes)} and a cache do not fit into "
            f"{size(info.free_bytes)} of free device memory; give a smaller model or --size"
        )
    if model is None:
        _check_disk(subject.weight_bytes)
    return subject


def _own_size(info: _C.DeviceInfo, *, emulated: bool) -> int:
    """Bytes of weights that make the point on this machine without taking long."""
    if emulated:
        return min(info.free_bytes // 16, 64 * _MIB)
    return min(info.free_bytes // 8, 2048 * _MIB, _C.available_host_bytes() // 4)


def _check_disk(needed: int) -> None:
    folder = tempfile.gettempdir()
    free = shutil.disk_usage(folder).free
    if needed > free:
        raise DemoError(
            f"the checkpoint of {size(needed)} does not fit into {folder!r}, {size(free)} free; "
            "set TMPDIR to another folder, or give a smaller --size"
        )


@dataclass(frozen=True)
class _Picture:
    """Where every tensor is, and what the weights hold."""

    addresses: dict[str, int]
    contents: dict[str, bytes]

    @classmethod
    def take(cls, model: torch.nn.Module, cache: list[torch.Tensor]) -> _Picture:
        weights = dict(_named(model))
        every = {**weights, **{f"{CACHE}[{index}]": part for index, part in enumerate(cache)}}
        with ThreadPoolExecutor(os.cpu_count()) as threads:
            digests = threads.map(_digest, weights.values())
            contents = dict(zip(weights, digests, strict=True))
        return cls({name: tensor.data_ptr() for name, tensor in every.items()}, contents)


class _Demo:
    """One run; what is not as it should be is collected in ``faults``."""

    def __init__(self, subject: Subject, say: Say) -> None:
        self.subject = subject
        self.say = say
        self.device = cumem.default_device()
        self.faults: list[str] = []
        self.notes: list[str] = []  # for below the table

    def run(self) -> int:
        self._head()
        model = self._build()
        cache = self._allocate_cache(model)
        with torch.inference_mode():
            output = self._run_twice(model, cache)
            before = _Picture.take(model, cache)
            self._sleep_and_wake()
            self._compare(before, _Picture.take(model, cache))
            self._compare_output(output, self.subject.run(model, cache).cpu())
        self._row("run again")
        return self._conclude()

    def _build(self) -> torch.nn.Module:
        with cumem.use_memory_pool(WEIGHTS):
            self._row("start")
            model = self.subject.build(self.device)
            self._row("model constructed")
        loaded = self.subject.load(model)
        self._row("checkpoint copied")
        self.notes.append(
            f"loaded:   {loaded.tensors} tensors, {size(loaded.bytes)}, from {loaded.files} file(s)"
        )
        return model

    def _allocate_cache(self, model: torch.nn.Module) -> list[torch.Tensor]:
        with cumem.use_memory_pool(CACHE):
            cache = self.subject.make_cache(self.device, self.subject.weight_bytes // 2)
        self._row("KV cache allocated")
        outside = cumem.covered(model, WEIGHTS)
        outside += [f"{CACHE}[{i}]" for i, part in enumerate(cache) if cumem.tag_of(part) != CACHE]
        count = len(dict(_named(model)))
        self._note(
            "covered",
            f"all {count} parameters and buffers are in pool {WEIGHTS!r}, "
            f"all {len(cache)} cache tensors in pool {CACHE!r}",
            f"not in their pools: {', '.join(outside)}" if outside else None,
        )
        return cache

    def _run_twice(self, model: torch.nn.Module, cache: list[torch.Tensor]) -> torch.Tensor:
        """The output; a model that disagrees with itself cannot be compared."""
        first = self.subject.run(model, cache).cpu().clone()
        self._row("first run")
        second = self.subject.run(model, cache).cpu()
        if _differing_bytes(first, second):
            raise DemoError(
                "two runs of the model before any sleep gave different bits: it is not "
                "deterministic on this device, so nothing can be compared"
            )
        return first

    def _sleep_and_wake(self) -> None:
        before = cumem.stats()
        slept = cumem.sleep()
        self._row("asleep")
        asleep = cumem.stats()
        cumem.check()
        woken = cumem.wake_up()
        self._row("awake")
        cumem.check()
        left = before.mapped_bytes - slept.freed_bytes
        used = [sum(device.used_bytes for device in now.devices) for now in (before, asleep)]
        self.notes.append(f"sleep:    {slept}")
        self._note(
            "memory",
            f"in use on the device: {size(used[0])} before, {size(used[1])} asleep; "
            f"{size(used[0] - used[1])} went back to the driver",
            f"{size(left)} did not go back" if left or asleep.mapped_bytes else None,
        )
        self.notes.append(f"wake:     {woken}")

    def _compare(self, before: _Picture, after: _Picture) -> None:
        moved = [name for name, at in before.addresses.items() if after.addresses[name] != at]
        changed = [name for name, was in before.contents.items() if after.contents[name] != was]
        self._note(
            "pointers",
            f"all {len(before.addresses)} are the same",
            f"moved: {', '.join(moved)}" if moved else None,
        )
        self._note(
            "contents",
            f"all {len(before.contents)} parameters and buffers have the same bits",
            f"contents changed: {', '.join(changed)}" if changed else None,
        )

    def _compare_output(self, before: torch.Tensor, after: torch.Tensor) -> None:
        differing = _differing_bytes(before, after)
        self.notes.append(f"run:      {self.subject.describe(after)}")
        self._note(
            "output",
            f"all {before.nbytes} bytes are the same before and after",
            f"{differing} of {before.nbytes} bytes of the output differ" if differing else None,
        )

    def _note(self, label: str, good: str, bad: str | None) -> None:
        self.notes.append(f"{label + ':':<9} {bad or good}")
        if bad is not None:
            self.faults.append(bad)

    def _head(self) -> None:
        self.say(f"{'step':<19}" + "".join(f"{name:>12}" for name in _COLUMNS))

    def _row(self, step: str) -> None:
        now = cumem.stats()
        cells = (
            size(now.live_bytes),
            size(sum(device.reserved_bytes for device in now.devices)),
            size(now.segment_bytes),
            str(sum(tag.segments for tag in now.tags)),
            size(sum(device.used_bytes for device in now.devices)),
            size(now.host_bytes),
        )
        self.say(f"{step:<19}" + "".join(f"{cell:>12}" for cell in cells))

    def _conclude(self) -> int:
        self.say("")
        for note in self.notes:
            self.say(note)
        self.say("")
        if self.faults:
            self.say(f"NOT identical: {'; '.join(self.faults)}")
            return 1
        self.say("Identical: every pointer and every bit is what it was before the sleep.")
        return 0


def _named(model: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    yield from model.named_parameters()
    yield from model.named_buffers()


def _digest(tensor: torch.Tensor) -> bytes:
    host = tensor.detach().cpu().contiguous()
    if host.nbytes == 0:
        return b""
    return hashlib.blake2b((ctypes.c_char * host.nbytes).from_address(host.data_ptr())).digest()


def _differing_bytes(left: torch.Tensor, right: torch.Tensor) -> int:
    """Compared as bytes: a NaN equals itself, and 0.0 is not -0.0."""
    if left.shape != right.shape or left.dtype != right.dtype:
        return max(left.nbytes, right.nbytes)
    pair = [tensor.contiguous().reshape(-1).view(torch.uint8) for tensor in (left, right)]
    return int((pair[0] != pair[1]).sum())
