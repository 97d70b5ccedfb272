"""What do the tests share? Patterns, the driver under test, other tenants, fresh processes."""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from plain_memory import GRANULE, PlainMemory

import cumem
from cumem import _runtime
from cumem.testing import EmulatedDriver

MIB = 1 << 20


# Contents


_ROW = 4093  # a prime, so that no row starts where a page does


def pattern(count: int, seed: int = 0) -> torch.Tensor:
    """``count`` bytes on the host that depend on the position, and differ from seed to seed."""
    rows, columns = _mixed(-(-count // _ROW), seed + 1), _mixed(_ROW, seed + 7919)
    return (rows[:, None] ^ columns[None, :]).view(-1)[:count]


def _mixed(count: int, seed: int) -> torch.Tensor:
    index = (torch.arange(count, dtype=torch.int64) + seed * 65_537) * 0x9E3779B1
    return ((index ^ (index >> 15)) >> 8 & 0xFF).to(torch.uint8)


def raw(tensor: torch.Tensor) -> torch.Tensor:
    """The bytes of a contiguous tensor, as a view."""
    return tensor.detach().reshape(-1).view(torch.uint8)


def make(count: int, seed: int = 0, *, device: Any = None) -> torch.Tensor:
    """A tensor of ``count`` bytes with its pattern, made where the innermost scope says."""
    return make_as(torch.uint8, (count,), seed, device=device)


def make_as(
    dtype: torch.dtype, shape: tuple[int, ...], seed: int = 0, *, device: Any = None
) -> torch.Tensor:
    where = cumem.default_device() if device is None else device
    tensor = torch.empty(shape, dtype=dtype, device=where)
    fill_pattern(tensor, seed)
    return tensor


def fill_pattern(tensor: torch.Tensor, seed: int = 0) -> None:
    """Writes the pattern; of a bool only its lowest bit, others are not its values."""
    with outside_scopes():
        contents = contents_of(tensor, seed)
    if tensor.numel():
        raw(tensor).copy_(contents)


def contents_of(tensor: torch.Tensor, seed: int = 0) -> torch.Tensor:
    contents = pattern(tensor.numel() * tensor.element_size(), seed)
    return contents & 1 if tensor.dtype is torch.bool else contents


def holds_pattern(tensor: torch.Tensor, seed: int = 0) -> bool:
    """Are the bytes of ``tensor`` those that :func:`make` wrote?"""
    return same_bytes(tensor, contents_of(tensor, seed))


def same_bytes(tensor: torch.Tensor, expected: torch.Tensor) -> bool:
    assert cumem.is_mapped(tensor), "touching it would end the process"
    return torch.equal(raw(tensor).cpu(), raw(expected).cpu())


def host_bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    return raw(tensor).cpu().clone()


def bytes_of(module: torch.nn.Module) -> dict[str, bytes]:
    """The contents of every parameter and buffer, row-major."""
    with outside_scopes():
        hosts = {name: t.detach().cpu().contiguous() for name, t in named_tensors(module).items()}
        return {name: ctypes.string_at(t.data_ptr(), t.nbytes) for name, t in hosts.items()}


def outside_scopes() -> Any:
    """A block whose cpu tensors are no one's: helpers must not be captured."""
    return torch.utils._python_dispatch._disable_current_modes()


def memory_at(address: int, count: int) -> torch.Tensor:
    """Emulated device memory as it is, whether a tensor lives there or not."""
    return torch.frombuffer((ctypes.c_char * count).from_address(address), dtype=torch.uint8)


# The driver under test

DRIVERS = ("cuda", "emulated")
BODY_PASSED = pytest.StashKey[bool]()


def chosen_driver(config: pytest.Config) -> str:
    """``--driver`` or CUMEM_TEST_DRIVER; else cuda where torch sees a GPU, else emulated."""
    asked = config.getoption("--driver")
    if asked is not None and asked not in DRIVERS:
        raise pytest.UsageError(f"unknown driver {asked!r}; choices: {', '.join(DRIVERS)}")
    return asked or ("cuda" if torch.cuda.is_available() else "emulated")


class UnavailableError(Exception):
    """The driver under test has no such capability."""


class DriverUnderTest:
    """One face for the real driver and the emulated one."""

    def __init__(self, emulator: EmulatedDriver | None) -> None:
        self._emulator = emulator
        self.tolerates_refusals = False  # the test made the driver refuse to take memory back

    @property
    def emulated(self) -> bool:
        return self._emulator is not None

    @property
    def emulator(self) -> EmulatedDriver:
        if self._emulator is None:
            raise UnavailableError("the real driver cannot be steered")
        return self._emulator

    @property
    def device(self) -> torch.device:
        return cumem.default_device()

    def used_bytes(self, device: int = 0) -> int:
        """Memory in use on the device, by everybody."""
        if self._emulator is not None:
            return self._emulator.used_bytes(device)
        free, total = self._memory(device)
        return total - free

    def free_bytes(self, device: int = 0) -> int:
        return self._memory(device)[0]

    def _memory(self, device: int) -> tuple[int, int]:
        if self._emulator is None:
            torch.cuda.synchronize(device)
            return torch.cuda.mem_get_info(device)
        info = _runtime.current().allocator.device_info(device)
        return info.free_bytes, info.total_bytes

    @contextmanager
    def another_tenant(self, leaves: int) -> Iterator[None]:
        """Somebody else takes device memory, all but ``leaves`` bytes."""
        wanted = (self.free_bytes() - leaves) // GRANULE * GRANULE
        assert wanted > 0, "the device is too full for this test"
        machine = None if self._emulator is None else self._emulator.machine
        with PlainMemory(machine, wanted):
            yield


# What cumem says


def tag_stats(tag: str) -> cumem.TagStats:
    (found,) = [entry for entry in cumem.stats().tags if entry.tag == tag]
    return found


def pointers(module: torch.nn.Module) -> dict[str, int]:
    return {name: tensor.data_ptr() for name, tensor in named_tensors(module).items()}


def named_tensors(module: torch.nn.Module) -> dict[str, torch.Tensor]:
    tensors = dict(module.named_parameters(remove_duplicate=False))
    return {**tensors, **dict(module.named_buffers(remove_duplicate=False))}


def state() -> tuple[object, ...]:
    """All of what a call that changes nothing must leave alone."""
    stats = cumem.stats()
    tags = tuple(entry for entry in stats.tags if entry.segments)
    return (
        cumem.sleeping_tags(),
        tags,
        stats.host_used_bytes,
        stats.physical_bytes,
        stats.reserved_addresses,
    )


# Threads and processes


def in_thread(work: Callable[[], Any], *, name: str = "worker") -> Any:
    """Runs ``work`` on a thread of its own; returns or raises what it does."""
    with ThreadPoolExecutor(1, thread_name_prefix=name) as executor:
        return executor.submit(work).result(timeout=60)


@contextmanager
def scope_on_a_thread(tag: str, *, name: str) -> Iterator[None]:
    """A scope of ``tag`` is open on another thread within the block."""
    opened, leave = threading.Event(), threading.Event()
    kept: list[torch.Tensor] = []

    def work() -> None:
        with cumem.use_memory_pool(tag):
            kept.append(make(100))
            opened.set()
            assert leave.wait(60)

    failures: list[BaseException] = []

    def guarded() -> None:
        try:
            work()
        except BaseException as error:  # noqa: BLE001 - shown by the thread that waits
            failures.append(error)
        finally:
            opened.set()

    thread = threading.Thread(target=guarded, name=name)
    thread.start()
    try:
        assert opened.wait(60)
        yield
    finally:
        leave.set()
        thread.join(60)
    assert not failures, failures
    kept.clear()


def run_process(
    code: str, environment: dict[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    """Runs code in a fresh interpreter, with the emulated driver unless told otherwise."""
    return subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "CUMEM_DRIVER": "emulated", **(environment or {})},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )


def run_fresh(
    code: str, environment: dict[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    """As :func:`run_process`; the process must end well, with nothing on stderr."""
    done = run_process(code, environment)
    assert (done.returncode, done.stderr) == (0, ""), done.stderr
    return done
