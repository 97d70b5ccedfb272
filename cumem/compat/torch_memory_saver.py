"""torch_memory_saver's interface over cumem.

    from cumem.compat.torch_memory_saver import torch_memory_saver

Names and meanings are those of that library. What differs: pausing what is paused and
resuming what is active do nothing; a failure is an exception and leaves nothing lost,
where that library ends the process; ``cuda_graph`` needs no preloaded library; regions
may be nested, entered by several threads, and used with expandable segments.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch

from cumem import _backup, _outside, _registry, _runtime
from cumem.compat._graphs import GraphPools
from cumem.errors import CumemError
from cumem.options import OnSleep
from cumem.pool import use_memory_pool
from cumem.sleep import sleep, wake_up

__all__ = ["TorchMemorySaver", "configure_subprocess", "torch_memory_saver"]

_DEFAULT = "default"


class TorchMemorySaver:
    """What :data:`torch_memory_saver` is; one is enough for a process.

    It pauses and resumes the tags of its own regions, and no other pool's.
    """

    enabled = True  # programs ask for it; here there is no way to switch it off

    def __init__(self) -> None:
        self._tags: set[str] = set()
        self._graphs = GraphPools()

    @contextmanager
    def region(
        self,
        tag: str = _DEFAULT,
        enable_cpu_backup: bool = False,  # noqa: FBT001, FBT002 - that library's interface
        *,
        cpu_backup_backend: str | None = None,
    ) -> Iterator[None]:
        """What this thread allocates inside can be paused.

        Args:
            tag: a name for :meth:`pause` and :meth:`resume`.
            enable_cpu_backup: contents come back at resume; else they are undefined.
            cpu_backup_backend: None or ``"pinned"``.

        Raises:
            ValueError: an empty tag, or another backend. DriverError: no usable driver.
        """
        _check_backend(cpu_backup_backend, enabled=enable_cpu_backup)
        with use_memory_pool(tag, on_sleep=_policy(enable_cpu_backup)):
            self._tags.add(tag)
            yield

    @contextmanager
    def cuda_graph(
        self,
        cuda_graph: torch.cuda.CUDAGraph,
        pool: tuple[int, int] | None = None,
        stream: torch.cuda.Stream | None = None,
        capture_error_mode: str = "global",
        tag: str = _DEFAULT,
        enable_cpu_backup: bool = False,  # noqa: FBT001, FBT002 - that library's interface
        cpu_backup_backend: str | None = None,
    ) -> Iterator[None]:
        """Captures as ``torch.cuda.graph`` does, into memory that can be paused.

        Args:
            cuda_graph: the graph to capture into.
            pool: captures that are given the same id share memory. It may be one from
                ``torch.cuda.graph_pool_handle()`` or ``CUDAGraph.pool()``; the memory
                is a pool of cumem's.
            stream: where to capture. capture_error_mode: as torch has it.
            tag: a name for :meth:`pause` and :meth:`resume`.
            enable_cpu_backup: constants that the graph keeps in its memory come back;
                without it, only what a replay writes before it reads is right.

        Raises:
            CumemError: no CUDA device (the emulator has no graphs).
            BusyError: a capture into this pool is under way. AsleepError: it is paused.
        """
        _check_backend(cpu_backup_backend, enabled=enable_cpu_backup)
        if _runtime.current().emulated:
            raise CumemError("cuda_graph() needs a CUDA device: the emulator has no graphs")
        with self._graphs.opened(pool, tag, _policy(enable_cpu_backup)) as ours:
            self._tags.add(tag)
            handle: Any = ours.id
            with torch.cuda.graph(
                cuda_graph, pool=handle, stream=stream, capture_error_mode=capture_error_mode
            ):
                yield

    @contextmanager
    def disable(self) -> Iterator[None]:
        """What this thread allocates inside is torch's own and never paused.

        For use in a region; outside of one it changes nothing.
        """
        with _outside.outside_pools():
            yield

    def pause(self, tag: str | None = None) -> None:
        """Gives the device memory of a tag, or of all regions, back; pointers stay valid.

        What is paused stays so. A tag without a region has nothing to pause.

        Raises:
            BusyError: a region of the tag is open, or a graph capture is under way.
            HostOutOfMemoryError: no room for the backups. Nothing was changed by these.
            DriverError: as :func:`cumem.sleep`.
        """
        if tags := self._chosen(tag):
            sleep(tags=tags)

    def resume(self, tag: str | None = None) -> None:
        """Brings memory back at the same addresses; all or nothing.

        What is active stays so. A tag without a region has nothing to resume.

        Raises:
            DeviceOutOfMemoryError, DriverError: everything stays paused with its
                backups, and the call can be repeated.
        """
        if tags := self._chosen(tag):
            wake_up(tags)

    def get_cpu_backup(
        self,
        x: torch.Tensor,
        zero_copy: bool = False,  # noqa: FBT001, FBT002 - that library's interface
    ) -> torch.Tensor | None:
        """What a paused tensor holds: a copy on the host that is the caller's own.

        Args:
            x: contiguous, from a region with ``enable_cpu_backup``.
            zero_copy: not offered: a view would change with the next pause.

        Returns:
            A cpu tensor of the same shape and type; None while ``x`` is active.

        Raises:
            ValueError: not contiguous, not from a region, or ``zero_copy``.
            CumemError: paused without a backup.
        """
        if zero_copy:
            raise ValueError("zero_copy is not offered: a backup is read as a copy")
        return _backup.backup_of(x)

    @property
    def hook_mode(self) -> str:
        """``"torch"``: allocations come through pools of torch's."""
        return "torch"

    @hook_mode.setter
    def hook_mode(self, mode: str) -> None:
        if mode != "torch":
            raise ValueError(
                f"unknown hook_mode {mode!r}; choices: 'torch' (it pauses graphs as well, and "
                "no library has to be preloaded)"
            )

    @property
    def memory_margin_bytes(self) -> int:
        """Device memory that allocations in regions leave free; 0 at first."""
        return _runtime.current_options().memory_margin_bytes

    @memory_margin_bytes.setter
    def memory_margin_bytes(self, value: int) -> None:
        _runtime.configure(replace(_runtime.current_options(), memory_margin_bytes=value))

    @property
    def retain_cpu_backup(self) -> bool:
        """Keep host memory of backups at resume? Here that is so at first.

        It makes the next pause faster, which then copies only what has changed.
        """
        return _runtime.current_options().retain_backup

    @retain_cpu_backup.setter
    def retain_cpu_backup(self, value: bool) -> None:
        _runtime.configure(replace(_runtime.current_options(), retain_backup=value))

    def _chosen(self, tag: str | None) -> list[str]:
        known = self._tags & _registry.known_tags()
        return sorted(known if tag is None else known & {tag})


def _policy(enable_cpu_backup: object) -> OnSleep:
    return OnSleep.OFFLOAD if enable_cpu_backup else OnSleep.DISCARD


def _check_backend(backend: str | None, *, enabled: bool) -> None:
    if backend is None:
        return
    if backend != "pinned":
        raise ValueError(f"unknown cpu_backup_backend {backend!r}; choices: 'pinned'")
    if not enabled:
        raise ValueError("cpu_backup_backend needs enable_cpu_backup=True")


@contextmanager
def configure_subprocess(*_: Any, **__: Any) -> Iterator[None]:
    """A process started inside needs nothing of its parent: no library is preloaded."""
    yield


torch_memory_saver = TorchMemorySaver()
