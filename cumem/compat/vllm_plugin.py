"""How does vLLM come to use cumem for its sleep mode?

vLLM calls :func:`register` through its ``vllm.general_plugins`` entry points, in every
process it starts. Nothing happens unless ``CUMEM_VLLM=1`` is set.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection
from importlib import import_module
from typing import Any

from cumem import options
from cumem.compat.vllm import CuMemAllocator, TaggedMemory

BACKEND = "cumem-vmm"  # its own name in vLLM's registry, where "cumem" is taken

_log = logging.getLogger("cumem")


def register() -> None:
    """Puts cumem's allocator in the place of vLLM's; twice is once.

    Where vLLM has a registry of sleep-mode backends, its own backend ``cumem`` then
    uses it, and ``cumem-vmm`` is there as well.

    Raises:
        ValueError: ``CUMEM_VLLM`` is neither 0 nor 1.
        ImportError: this vLLM has no allocator for sleep mode (it is older than 0.27).
    """
    if not options.vllm_is_switched_on():
        return
    module: Any = import_module("vllm.device_allocator.cumem")
    if module.CuMemAllocator is CuMemAllocator:
        return
    _refuse_if_used(module)
    CuMemAllocator.get_instance().hooks = _hooks_of_vllm()
    module.CuMemAllocator = CuMemAllocator
    module.cumem_available = True
    _register_backend()
    _log.info("vLLM's sleep mode uses cumem's allocator")


def _refuse_if_used(module: Any) -> None:
    """What vLLM's own allocator has given out, ours could never put to sleep."""
    if getattr(module.CuMemAllocator, "instance", None) is not None:
        raise RuntimeError(
            "vLLM's allocator is in use in this process; register cumem's before an engine is made"
        )


class _VllmHooks:
    """vLLM's own registry of hooks by tag."""

    def __init__(self, before: Callable[..., None], after: Callable[..., None]) -> None:
        self._before, self._after = before, after

    def before_unmap(self, memory: Collection[TaggedMemory], tags: Collection[str]) -> None:
        self._before(memory, tags)

    def after_map(self, memory: Collection[TaggedMemory]) -> None:
        self._after(memory)


def _hooks_of_vllm() -> _VllmHooks | None:
    package = import_module("vllm.device_allocator")
    before = getattr(package, "run_before_unmap_hooks", None)
    after = getattr(package, "run_after_map_hooks", None)
    return _VllmHooks(before, after) if before is not None and after is not None else None


def _register_backend() -> None:
    try:
        backends = import_module("vllm.device_allocator.sleep_mode_backend")
    except ModuleNotFoundError:  # before 0.28 there is one mechanism, and no registry
        return
    backends.SleepModeBackendFactory.register_backend(
        BACKEND, "cumem.compat.vllm_backend", "CumemBackend"
    )
