"""What can be configured, and what does the environment say?

The only module that reads the environment.
"""

from __future__ import annotations

import os
import tempfile
from dataclasses import dataclass, fields
from enum import Enum
from pathlib import Path

from cumem._text import choices

MIB = 1 << 20

_DISCARDED = ("kv_cache", "workspace")  # tags whose contents are not worth a copy


class OnSleep(str, Enum):
    """What a sleep does with the contents of a pool."""

    OFFLOAD = "offload"  # they come back
    DISCARD = "discard"  # they are gone
    KEEP = "keep"  # they stay on the device, and so does the memory
    RELOAD = "reload"  # they come back from the file that they were loaded from
    DISK = "disk"  # they come back from a private file in Options.disk_dir

    @classmethod
    def of(cls, value: OnSleep | str | None, tag: str) -> OnSleep:
        """The policy that ``value`` names; None stands for the default of ``tag``.

        Raises:
            ValueError: an unknown name. TypeError: neither a policy nor a string.
        """
        if value is None:
            return cls.DISCARD if tag in _DISCARDED else cls.OFFLOAD
        if not isinstance(value, str):
            raise TypeError(f"on_sleep must be an OnSleep or a string, not {type(value).__name__}")
        try:
            return cls(value)
        except ValueError:
            names = choices(policy.value for policy in cls)
            raise ValueError(f"unknown on_sleep {value!r}; choices: {names}") from None


class CleanCheck(str, Enum):
    """How a sleep finds out what its backups hold already."""

    DIGEST = "digest"  # by digests that the device computes
    NEVER = "never"  # not at all: everything is copied
    DECLARED = "declared"  # as mark_clean() and mark_dirty() say


@dataclass(frozen=True, kw_only=True)
class Options:
    """How the allocator works. Give it to :func:`cumem.configure`.

    Attributes:
        chunk_bytes: physical memory is taken in pieces of at most this size, a
            multiple of 2 MiB.
        memory_margin_bytes: device memory that a new allocation leaves free, as well as
            can be: with less left it fails as if the device were full. A wake may use it.
        host_limit_bytes: most host memory for backups. None: no limit of ours; then
            a sleep that needs more than the host has available is refused.
        pin_backups: keep backups in pinned host memory. False, for who may not pin much:
            in pageable memory, with copies through at most ``load_ring_bytes`` of pinned
            memory (slower, said in the report). It counts for memory that is taken from
            then on: backups that are there stay as they are until their memory goes.
        allow_pageable: when the driver refuses to pin host memory, use it unpinned
            (slower, said in the report) instead of refusing to sleep.
        retain_backup: keep backups after a wake, so that the next sleep copies only
            what has changed. False: their memory goes back to the system at wake.
        clean_check: how a sleep finds out what has not changed: ``"digest"``,
            ``"never"`` or ``"declared"``.
        disk_dir: folder, which must exist, for what sleeps to disk; it needs room for all of it.
        load_threads: threads that read and write files; 0: one per processor but one, at
            most 16.
        load_buffer_bytes: what one of them moves at a time, a multiple of 4 KiB.
        load_ring_bytes: most pinned host memory for all of it, at most 1 GiB. Copies from and
            to pageable backups go through the same threads and memory, for each device.
        host_threads: threads that touch new host memory; 0: three for each four processors.
        staging_bytes: the most that goes in one piece from a file to a module where it is
            not read straight into place, or back, at least 4 KiB. Host memory of twice that
            is used meanwhile.
        warn_empty_scope: warn when a scope ends in which nothing was captured.
        nvtx: mark the phases of sleep, wake and switch as NVTX ranges, for a profiler;
            without effect on a build of torch that has none.
    """

    chunk_bytes: int = 1024 * MIB
    memory_margin_bytes: int = 0
    host_limit_bytes: int | None = None
    pin_backups: bool = True
    allow_pageable: bool = True
    retain_backup: bool = True
    clean_check: CleanCheck = CleanCheck.DIGEST
    host_threads: int = 0
    staging_bytes: int = 32 * MIB
    warn_empty_scope: bool = True
    disk_dir: str | None = None
    load_threads: int = 0
    load_buffer_bytes: int = 4 * MIB
    load_ring_bytes: int = 128 * MIB
    nvtx: bool = False

    def __post_init__(self) -> None:
        object.__setattr__(self, "clean_check", _clean_check(self.clean_check))
        for field in fields(self):
            _check_type(field.name, getattr(self, field.name))
        if self.chunk_bytes <= 0 or self.chunk_bytes % (2 * MIB):
            raise ValueError(f"chunk_bytes must be a multiple of 2 MiB, not {self.chunk_bytes}")
        if self.memory_margin_bytes < 0:
            raise ValueError(
                f"memory_margin_bytes must not be negative, not {self.memory_margin_bytes}"
            )
        if self.host_limit_bytes is not None and self.host_limit_bytes <= 0:
            raise ValueError(f"host_limit_bytes must be positive, not {self.host_limit_bytes}")
        if not self.pin_backups and not self.allow_pageable:
            raise ValueError("pin_backups=False needs allow_pageable=True")
        for name in ("host_threads", "load_threads"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name} must not be negative, not {getattr(self, name)}")
        buffer, ring = self.load_buffer_bytes, self.load_ring_bytes
        if buffer <= 0 or buffer % 4096:
            raise ValueError(f"load_buffer_bytes must be a multiple of 4 KiB, not {buffer}")
        if not buffer <= ring <= 1024 * MIB:
            raise ValueError(
                f"load_ring_bytes must be from load_buffer_bytes ({buffer}) to 1 GiB, not {ring}"
            )
        if self.staging_bytes < 4096:
            raise ValueError(f"staging_bytes must be at least 4 KiB, not {self.staging_bytes}")


def _clean_check(value: CleanCheck | str) -> CleanCheck:
    try:
        return CleanCheck(value)
    except ValueError:
        names = choices(check.value for check in CleanCheck)
        raise ValueError(f"unknown clean_check {value!r}; choices: {names}") from None


_MAY_BE_NONE = ("host_limit_bytes", "disk_dir")
_BOOLEAN = ("pin_backups", "allow_pageable", "retain_backup", "warn_empty_scope", "nvtx")


def _check_type(name: str, value: object) -> None:
    if name == "clean_check" or (name in _MAY_BE_NONE and value is None):
        return
    wanted = bool if name in _BOOLEAN else str if name == "disk_dir" else int
    if type(value) is not wanted:
        raise TypeError(f"{name} must be {wanted.__name__}, not {type(value).__name__}")


def driver_choice() -> str:
    """``cuda`` or ``emulated``, as ``CUMEM_DRIVER`` says; ``cuda`` when it is not set.

    Raises:
        ValueError: anything else.
    """
    value = os.environ.get("CUMEM_DRIVER") or "cuda"
    if value not in ("cuda", "emulated"):
        raise ValueError(f"unknown CUMEM_DRIVER {value!r}; choices: 'cuda', 'emulated'")
    return value


def check_emulated_machine() -> None:
    """Raises ValueError where the environment asks for an emulated machine that cannot be."""
    for name in ("CUMEM_EMULATED_CAPACITY", "CUMEM_EMULATED_DEVICES"):
        value = os.environ.get(name) or "1"
        if not value.isdecimal() or int(value) == 0:
            raise ValueError(f"{name} must be a positive whole number, not {value!r}")


def driver_is_chosen() -> bool:
    """Does the environment say which driver to use?"""
    return bool(os.environ.get("CUMEM_DRIVER"))


def choose_emulator() -> None:
    """Makes this process, and those it starts, use the emulated driver.

    For the command line, before the first use of a driver; the library itself never
    changes the choice.
    """
    os.environ["CUMEM_DRIVER"] = "emulated"


def vllm_is_switched_on() -> bool:
    """Is vLLM to use cumem's allocator for its sleep mode? ``CUMEM_VLLM`` says so with ``1``.

    Raises:
        ValueError: neither ``0`` nor ``1``.
    """
    value = os.environ.get("CUMEM_VLLM") or "0"
    if value not in ("0", "1"):
        raise ValueError(f"unknown CUMEM_VLLM {value!r}; choices: '0', '1'")
    return value == "1"


def cache_folder() -> Path:
    """Where compiled kernels are kept: ``XDG_CACHE_HOME`` or ``~/.cache``."""
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "cumem"


def runtime_folder() -> Path:
    """Where sockets of this user's processes are: ``XDG_RUNTIME_DIR``, or temporary files."""
    base = os.environ.get("XDG_RUNTIME_DIR")
    return Path(base) / "cumem" if base else Path(tempfile.gettempdir()) / f"cumem-{os.getuid()}"


def allocator_settings_in_environment() -> str:
    """The torch allocator settings that the process was started with.

    Torch reads the newer of the two names first.
    """
    return os.environ.get("PYTORCH_ALLOC_CONF") or os.environ.get("PYTORCH_CUDA_ALLOC_CONF") or ""
