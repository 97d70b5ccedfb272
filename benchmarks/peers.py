"""How are other libraries told to put tensors to sleep and wake them?

Each is used as its own documentation says, and imported only when its adapter is made.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import AbstractContextManager
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from typing import Any, ClassVar

from adapters import CACHE, EVERYTHING, Adapter, Moved, UnavailableError

# What an import of a package with compiled parts may raise where they do not fit.
_IMPORT_ERRORS = (ImportError, OSError, RuntimeError, AttributeError, AssertionError)


class TmsAdapter(Adapter):
    """torch_memory_saver in its mode for pools of torch's.

    A pause takes new pinned memory and copies every allocation with a backup; a resume
    copies it back and frees that memory.
    """

    name = "tms"
    copies_everything = True
    retain: ClassVar[bool] = False

    def __init__(self) -> None:
        self._saver = self._imported()

    def _imported(self) -> Any:
        """The object that programs import, set as this adapter is to use it."""
        _need_a_gpu()
        try:
            saver = import_module("torch_memory_saver").torch_memory_saver
            saver.hook_mode = "torch"
            saver.retain_cpu_backup = self.retain  # also loads its library
        except _IMPORT_ERRORS as error:
            raise _cannot_import("torch_memory_saver", error) from error
        self.version = _version("torch_memory_saver")
        return saver

    def scope(self, tag: str) -> AbstractContextManager[object]:
        scope: AbstractContextManager[object] = self._saver.region(
            tag, enable_cpu_backup=tag != CACHE
        )
        return scope

    def sleep(self, tags: Sequence[str]) -> Moved:
        for tag in tags:
            self._saver.pause(tag)
        return Moved(None if self.retain else EVERYTHING)

    def wake(self, tags: Sequence[str]) -> Moved:
        for tag in tags:
            self._saver.resume(tag)
        return Moved(EVERYTHING)  # into new memory: there is no less


class TmsRetainedAdapter(TmsAdapter):
    """The same, keeping its pinned memory; what a later pause copies it does not tell."""

    name = "tms-retained"
    copies_everything = False
    retain = True


class VllmAdapter(Adapter):
    """The allocator of vLLM's sleep mode.

    A sleep concerns every allocation: those of ``offload_tags`` are copied, the others
    discarded. A wake concerns the tags that it is given.
    """

    name = "vllm"
    copies_everything = True

    def __init__(self) -> None:
        self._allocator = self._imported()

    def _imported(self) -> Any:
        """The one allocator of the process."""
        _need_a_gpu()
        os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")  # a line for each sleep otherwise
        try:
            library = import_module("vllm.device_allocator.cumem")
            allocator = library.CuMemAllocator.get_instance()
        except _IMPORT_ERRORS as error:
            raise _cannot_import("vllm.device_allocator.cumem", error) from error
        self.version = _version("vllm")
        return allocator

    def scope(self, tag: str) -> AbstractContextManager[object]:
        scope: AbstractContextManager[object] = self._allocator.use_memory_pool(tag)
        return scope

    def sleep(self, tags: Sequence[str]) -> Moved:
        offloaded = tuple(tag for tag in tags if tag != CACHE)
        return self._slept(self._allocator.sleep(offload_tags=offloaded))

    def wake(self, tags: Sequence[str]) -> Moved:
        return self._woken(self._allocator.wake_up(list(tags)))

    def _slept(self, answer: Any) -> Moved:
        """What was moved, from what the allocator answers: it answers nothing."""
        return Moved(EVERYTHING)

    def _woken(self, answer: Any) -> Moved:
        return Moved(EVERYTHING)

    def host_bytes(self) -> int | None:
        """Its backups are pinned tensors: torch knows what they take, rounded up as it does."""
        import torch

        held = torch.cuda.host_memory_stats().get("allocated_bytes.current")
        return None if held is None else int(held)


def _need_a_gpu() -> None:
    import torch

    if not torch.cuda.is_available():
        raise UnavailableError("it needs a GPU, and torch sees none")


def _cannot_import(module: str, error: BaseException) -> UnavailableError:
    first = str(error).splitlines()[:1] or [type(error).__name__]
    return UnavailableError(f"{module} cannot be imported here ({first[0]})")


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "unknown"
