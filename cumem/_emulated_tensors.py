"""How does a cpu tensor made inside a scope come to live in emulated device memory?

A `TorchDispatchMode` sees every op of the thread. When an op returns a tensor whose storage is
fresh host memory, the storage is exchanged for one over a block of the scope's pool, before the
caller sees the tensor. The block goes back when the last view of that storage has died.

Placed: the results of ops, factory functions, `torch.tensor(...)`, parameters and buffers of
modules built in the scope, deep copies of parameters, tensors that grow from zero bytes (`out=`,
`resize_`), and what a tensor subclass makes inside.
Not placed: memory that torch does not own (`from_numpy`, `frombuffer`, DLPack, file maps);
`torch.load`, `pickle`, and deep copies of plain tensors and buffers, which no op fills (`.clone()`
places them); sparse, quantized and nested tensors; what other threads make, and what `backward`
computes, since a real device computes it on a thread of autograd's own.
A placed tensor cannot grow: its storage is not resizable.
"""

# mypy: disable-error-code="no-untyped-call"
from __future__ import annotations

import ctypes
import functools
import os
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, Protocol

import torch
from torch.utils import _python_dispatch

_Op = Callable[..., Any]
_Shape = tuple[Any, ...]  # storage offset, size, stride

# A memoryview is the buffer object: it can be watched by a weak reference, it costs no new type
# per size as a ctypes array would, and making it does not touch the memory.
_view_memory = ctypes.pythonapi.PyMemoryView_FromMemory
_view_memory.restype = ctypes.py_object
_view_memory.argtypes = (ctypes.c_void_p, ctypes.c_ssize_t, ctypes.c_int)

# Their results keep the bytes that the device memory had, as on a real device. So does what a
# `resize_` adds to nothing.
_UNINITIALISED = frozenset(
    getattr(torch.ops.aten, name)
    for name in (
        *("empty", "empty_like", "empty_permuted", "empty_strided"),
        *("new_empty", "new_empty_strided", "resize_", "resize_as_"),
    )
)


class Block(Protocol):
    """A piece of device memory that one storage may use, until a `Death` names it."""

    address: int
    death: Death | None


class BlockSource(Protocol):
    """What a scope places tensors into."""

    def allocate(self, size: int) -> Block:
        """Return a block of at least `size` > 0 bytes, or raise."""


class Death(weakref.ref[Any]):
    """Joins `deaths` when the owner of `block` dies; the block keeps it, or nothing would join."""

    __slots__ = ("block",)
    block: Any


# An owner may die on any thread, and inside the garbage collector or a deleter of torch's. The
# callback of its weak reference is `append` itself, which runs no Python code and takes no lock.
deaths: deque[Death] = deque()


def give(block: Block, owner: object) -> None:
    """Let `owner` have the block until it dies."""
    death = Death(owner, deaths.append)
    death.block, block.death = block, death


class _Scope:
    """One entry into a scope: a token, told apart by identity."""

    def __init__(self, source: BlockSource | None) -> None:
        self.source = source
        self.backward = torch._C._current_graph_task_id()
        self.entered_within_op = False


class _Placement(_python_dispatch.TorchDispatchMode):
    """The mode of one thread, with the scopes open on it, innermost last.

    There is one for all scopes of a thread, because of several modes the outermost would see a
    result first. It may stay on torch's stack without scopes, and then does nothing: a scope may be
    left while another mode is above ours, or by another thread (a collected generator).
    """

    supports_higher_order_operators = True

    def __init__(self) -> None:
        super().__init__()
        self.scopes: list[_Scope] = []

    def open(self, scope: _Scope) -> None:
        if not any(mode is self for mode in _python_dispatch._get_current_dispatch_mode_stack()):
            # torch takes a mode off its stack while the mode handles an op; the op may be Python
            # code that opens a scope.
            scope.entered_within_op = bool(self.scopes)
            self.__enter__()
        self.scopes.append(scope)

    def close(self, scope: _Scope) -> None:
        """Forget `scope`, in whatever order and on whatever thread."""
        if scope in self.scopes:  # not in a forked child
            self.scopes.remove(scope)
        unused = scope.entered_within_op or not self.scopes
        if unused and _python_dispatch._get_current_dispatch_mode() is self:
            self.__exit__(None, None, None)

    def __torch_dispatch__(
        self, func: _Op, types: Iterable[type], args: Any = (), kwargs: Any = None
    ) -> Any:
        if any(map(_unwraps, types)):
            return NotImplemented  # the ops that the subclass calls inside come here again
        kwargs = kwargs or {}
        source = self._source()
        if source is None:
            return func(*args, **kwargs)
        return _call_and_place(func, args, kwargs, source)

    def _source(self) -> BlockSource | None:
        # torch hands the mode on to other threads with its thread-local state. On a real device
        # a backward pass has a thread of its own, with its own scopes.
        if getattr(_local, "placement", None) is not self or not self.scopes:
            return None
        scope = self.scopes[-1]
        return scope.source if scope.backward == torch._C._current_graph_task_id() else None


_local = threading.local()


def _of_this_thread() -> _Placement:
    placement: _Placement | None = getattr(_local, "placement", None)
    if placement is None:
        placement = _local.placement = _Placement()
    return placement


@contextmanager
def placing_into(source: BlockSource | None) -> Iterator[None]:
    """Place this thread's fresh cpu tensors into `source` (None: nowhere), unless an inner does."""
    placement, scope = _of_this_thread(), _Scope(source)
    placement.open(scope)
    try:
        yield
    finally:
        placement.close(scope)


# The child would hand out the same blocks as its parent, of memory that they share.
os.register_at_fork(after_in_child=lambda: _of_this_thread().scopes.clear())


@functools.cache
def _unwraps(kind: type) -> bool:
    """True for a subclass that handles ops itself; torch's tracing tensors leave it to modes."""
    handler = getattr(kind, "__torch_dispatch__", None)
    traces = kind.__module__.startswith("torch._subclasses.")
    return handler is not torch._C._disabled_torch_dispatch_impl and not traces


@functools.cache
def _mutates(func: _Op) -> bool:
    schema = getattr(func, "_schema", None)
    return schema is None or bool(schema.is_mutable)


def _call_and_place(func: _Op, args: Any, kwargs: Any, source: BlockSource) -> Any:
    # `lift_fresh` is all that is seen of `torch.tensor([...])`: its argument is the fresh tensor.
    inputs = () if func is torch.ops.aten.lift_fresh.default else (args, kwargs)
    before = _storage_sizes(inputs) if _mutates(func) else None
    result = _call(func, args, kwargs)
    found = [(leaf, host) for leaf in _leaves(result) if (host := _host_storage(leaf)) is not None]
    if not found:
        return result
    given = _storage_sizes(inputs) if before is None else before
    fresh = [(tensor, host) for tensor, host in found if not given.get(host._cdata)]
    _move(fresh, source, copies=_has_contents(func))
    return result


def _call(func: _Op, args: Any, kwargs: Any) -> Any:
    shapes = _fixed_shapes((args, kwargs)) if _mutates(func) else []
    try:
        return func(*args, **kwargs)
    except RuntimeError as error:
        if "not resizable" not in str(error):
            raise
        for tensor, shape in shapes:  # torch has enlarged the tensor without its storage
            _set(tensor, tensor.untyped_storage(), shape)
        raise RuntimeError(
            f"{func}: a tensor cannot grow whose storage is emulated device memory, or borrowed "
            f"from elsewhere; make a new tensor of the size you need ({error})"
        ) from error


def _fixed_shapes(args: Any) -> list[tuple[torch.Tensor, _Shape]]:
    return [
        (leaf, _shape(leaf))
        for leaf in _leaves(args)
        if isinstance(leaf, torch.Tensor)
        and torch._C._has_storage(leaf)
        and not leaf.untyped_storage().resizable()
    ]


def _has_contents(func: _Op) -> bool:
    if getattr(func, "overloadpacket", None) in _UNINITIALISED:
        fills = torch._C._get_deterministic_fill_uninitialized_memory()
        return fills and torch.are_deterministic_algorithms_enabled()
    return True


def _leaves(value: Any) -> Iterator[Any]:
    if isinstance(value, (tuple, list)):
        for item in value:
            yield from _leaves(item)
    elif isinstance(value, dict):
        yield from _leaves(tuple(value.values()))
    else:
        yield value


def _storage_sizes(args: Any) -> dict[int, int]:
    """Identity and bytes of every storage in the arguments of an op.

    A storage that is given and has bytes is no fresh one afterwards; one without is, if it grew.
    """
    storages = [storage for leaf in _leaves(args) if (storage := _storage_of(leaf)) is not None]
    return {storage._cdata: storage.nbytes() for storage in storages}


def _storage_of(leaf: Any) -> torch.UntypedStorage | None:
    if isinstance(leaf, torch.Tensor):
        return leaf.untyped_storage() if torch._C._has_storage(leaf) else None
    return leaf if isinstance(leaf, torch.UntypedStorage) else None


def _host_storage(leaf: Any) -> torch.UntypedStorage | None:
    """The storage of a tensor where it is host memory that could be exchanged.

    The storage is asked, not the tensor: a fake tensor says cpu. Memory that torch does not own
    is not resizable, and neither is ours. A zero tensor of autograd has bytes but no memory.
    """
    if not isinstance(leaf, torch.Tensor) or leaf.is_quantized or leaf.is_nested:
        return None
    storage = _storage_of(leaf)
    if storage is None or not storage.resizable() or storage.device.type != "cpu":
        return None
    return storage if storage.nbytes() and not leaf._is_zerotensor() else None


def _move(
    pairs: list[tuple[torch.Tensor, torch.UntypedStorage]], source: BlockSource, *, copies: bool
) -> None:
    """Give each tensor a storage over a block of `source`, shared where theirs was shared.

    `pairs` holds the host storages, so that none of their identities is used again meanwhile.
    """
    moved: dict[int, torch.UntypedStorage] = {}
    for tensor, host in pairs:
        if host._cdata not in moved:
            size = host.nbytes()
            moved[host._cdata] = storage = _storage_over(source.allocate(size), size)
            if copies:
                ctypes.memmove(storage.data_ptr(), host.data_ptr(), size)
        _set(tensor, moved[host._cdata], _shape(tensor))


def _storage_over(block: Block, size: int) -> torch.UntypedStorage:
    view = _view_memory(block.address, size, 0x200)  # PyBUF_WRITE
    give(block, view)
    with torch._C.DisableTorchFunction():
        return torch.frombuffer(view, dtype=torch.uint8).untyped_storage()


def _shape(tensor: torch.Tensor) -> _Shape:
    return tensor.storage_offset(), tensor.size(), tensor.stride()


def _set(tensor: torch.Tensor, storage: torch.UntypedStorage, shape: _Shape) -> None:
    # No other mode should see this, least of all one that records ops.
    with torch._C.DisableTorchFunction(), torch._C._DisableTorchDispatch():
        tensor.set_(storage, *shape)
