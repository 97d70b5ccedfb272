"""How is a use of sleeping weights noticed before it ends the process?"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TypeVar

import torch
from torch.utils.hooks import RemovableHandle

from cumem import _registry
from cumem.errors import AsleepError
from cumem.inspection import is_mapped, tag_of

_Module = TypeVar("_Module", bound=torch.nn.Module)


def guard(module: _Module) -> RemovableHandle:
    """Makes a call of ``module`` raise :class:`AsleepError` while its weights are asleep.

    The error names the first tag and parameter. While nothing sleeps the check
    reads one flag. Guard the module that is called; its submodules are looked at
    through it.

    Returns:
        A handle; its ``remove()`` takes the guard away.
    """
    return module.register_forward_pre_hook(_check)


def _check(module: torch.nn.Module, _inputs: object) -> None:
    if not _registry.anything_asleep():
        return
    for name, tensor in _named(module):
        if not is_mapped(tensor):
            kind = type(module).__name__
            raise AsleepError(
                f"{kind} was called while {name!r} (tag {tag_of(tensor)!r}) is asleep. "
                "Nothing was run; call wake_up first."
            )


def _named(module: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    yield from module.named_parameters()
    yield from module.named_buffers()
