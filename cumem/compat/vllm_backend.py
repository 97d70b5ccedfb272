"""cumem as a backend of vLLM's sleep mode; vLLM imports it when it is chosen by name."""

from __future__ import annotations

from importlib import import_module
from typing import Any

from cumem.compat.vllm import CuMemAllocator

_Base: Any = import_module("vllm.device_allocator.sleep_mode_backend").SleepModeBackend


class CumemBackend(_Base):  # type: ignore[misc] # vLLM need not be here to check types
    """Frees and restores what vLLM allocated through :class:`CuMemAllocator`.

    ``_state`` is vLLM's: it changes after the memory did, so that a failure leaves the
    state that is true.
    """

    def suspend(self, level: int = 1) -> None:
        """Level 1 backs the weights up; level 2 discards them."""
        CuMemAllocator.get_instance().sleep(("weights",) if level == 1 else ())
        self._state = "SUSPENDED"

    def resume(self, tags: list[str] | None = None) -> None:
        """As :meth:`CuMemAllocator.wake_up`."""
        before, self._state = self._state, "RESUMING"
        try:
            CuMemAllocator.get_instance().wake_up(tags)
        except BaseException:
            self._state = before
            raise
        self._state = "RUNNING"

    def discard(self, tags: tuple[str, ...] | str) -> None:
        """As :meth:`CuMemAllocator.discard`."""
        CuMemAllocator.get_instance().discard(tags)

    @classmethod
    def preserves_communicators(cls) -> bool:
        """Buffers of NCCL are not in the pools."""
        return True

    @classmethod
    def preserves_compiled_artifacts(cls) -> bool:
        """The process lives on, and addresses stay."""
        return True
