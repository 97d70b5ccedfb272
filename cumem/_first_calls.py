"""Which modules wait for their memory at their first call, and until when?

Note [Modules that nobody calls]: a forward may use a submodule's weights without calling it,
and then nothing takes its hook away at a call. All hooks that are needed no more go when
somebody has waited for the wake (:meth:`WakeHandle.wait`, which the next sleep or wake calls,
too). Not from the wake's own thread: who copies a module meanwhile walks through its hooks.
After a wake that failed, a hook is all that keeps a call off memory that is not there. So it
stays until that memory is awake, and each later sleep or wake looks again.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import NamedTuple
from weakref import WeakKeyDictionary

import torch

_CONTAINERS = (torch.nn.Sequential, torch.nn.ModuleList, torch.nn.ModuleDict)


class _Wait(NamedTuple):
    hook_id: int
    owes: Callable[[torch.Tensor], bool]


_waiting: WeakKeyDictionary[torch.nn.Module, _Wait] = WeakKeyDictionary()
_lock = threading.Lock()


def own_tensors(module: torch.nn.Module, *, inside: bool = False) -> list[torch.Tensor]:
    """Its parameters and buffers; ``inside``: those of its submodules as well."""
    return [*module.parameters(recurse=inside), *module.buffers(recurse=inside)]


def wait_at_first_call(
    module: torch.nn.Module,
    wait_for: Callable[[torch.Tensor], None],
    owes: Callable[[torch.Tensor], bool],
) -> None:
    """Makes a module wait for what it uses; in the place of what it was to wait for before.

    Args:
        module: one without parameters and buffers is left alone.
        wait_for: called with each tensor that the module uses, at its first call.
        owes: is there anything to wait for yet?
    """
    if not _used_by(module):
        return
    _forget(module)
    installed: list[int] = []

    # It asks the module that is called, which may be a copy of this one.
    def hook(called: torch.nn.Module, _inputs: object) -> None:
        for tensor in _used_by(called):
            wait_for(tensor)
        called._forward_pre_hooks.pop(installed[0], None)

    installed.append(module.register_forward_pre_hook(hook).id)
    with _lock:
        _waiting[module] = _Wait(installed[0], owes)


def forget_paid() -> None:
    """Takes back the hooks of modules that need not wait any more, called or not."""
    if not _waiting:
        return
    with _lock:
        waits = list(_waiting.items())
    for module, wait in waits:
        if not any(wait.owes(tensor) for tensor in _used_by(module)):
            _forget(module, wait)


def _forget(module: torch.nn.Module, only: _Wait | None = None) -> None:
    """Takes its hook back; ``only`` this one, where another wake may have put a new one there."""
    with _lock:
        wait = _waiting.get(module)
        if wait is None or (only is not None and wait is not only):
            return
        del _waiting[module]
    module._forward_pre_hooks.pop(wait.hook_id, None)


def _used_by(module: torch.nn.Module) -> list[torch.Tensor]:
    """What its forward uses and no submodule waits for."""
    return own_tensors(module, inside=_reads_inside(module))


def _reads_inside(module: torch.nn.Module) -> bool:
    """May its forward use weights of its submodules without calling them?"""
    is_torchs = type(module).__module__.startswith("torch.nn.")
    return is_torchs and not isinstance(module, _CONTAINERS)
