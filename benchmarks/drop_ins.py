"""How is this library told to do it, by a program that was written for another?

Each is used exactly as its original in ``peers.py``: only what is imported differs.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

from adapters import CACHE, WEIGHTS, CumemAdapter, Moved, UnavailableError, slept, woken
from peers import TmsAdapter, TmsRetainedAdapter, VllmAdapter


class _DropIn:
    """What a drop-in has of this library: before its original in the order of bases."""

    device = CumemAdapter.device
    host_bytes = CumemAdapter.host_bytes

    def _start(self) -> None:
        import cumem

        self._cumem = cumem
        self.version = cumem.__version__


class CumemAsTmsAdapter(_DropIn, TmsAdapter):
    """The drop-in for torch_memory_saver, told to keep no host memory between pauses.

    As ``tms``: every pause makes its backups anew.
    """

    name = "cumem-as-tms"

    def _imported(self) -> Any:
        from cumem.compat.torch_memory_saver import torch_memory_saver as saver

        self._start()
        saver.hook_mode = "torch"
        saver.retain_cpu_backup = self.retain
        return saver


class CumemAsTmsRetainedAdapter(TmsRetainedAdapter, CumemAsTmsAdapter):
    """The same as it is at first: host memory is kept, and what has not changed is not copied."""

    name = "cumem-as-tms-retained"


class CumemAsVllmAdapter(_DropIn, VllmAdapter):
    """The drop-in for vLLM's allocator. It answers with reports, so what it copied is known."""

    name = "cumem-as-vllm"
    copies_everything = False

    def _imported(self) -> Any:
        from cumem.compat.vllm import CuMemAllocator

        self._start()
        return CuMemAllocator.get_instance()

    def scope(self, tag: str) -> AbstractContextManager[object]:
        if tag not in (WEIGHTS, CACHE):
            raise UnavailableError(
                f"a wake of other tags brings {tag!r} too: all but {WEIGHTS} and {CACHE} come back"
            )
        return super().scope(tag)

    def _slept(self, answer: Any) -> Moved:
        return slept(answer)

    def _woken(self, answer: Any) -> Moved:
        return woken(answer)
