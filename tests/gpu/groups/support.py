"""What do the checks of every group share? Contents, sizes and measures."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

import cumem

KIB = 1 << 10
MIB = 1 << 20
GIB = 1 << 30
GRANULE = 2 * MIB

DEVICE = cumem.default_device()
CUDA = DEVICE.type == "cuda"

_STEP = 32 * MIB  # contents are made and compared in pieces of this size
_WORD = 8


def scaled(count: int) -> int:
    """A size for a GPU; a 64th of it, in whole granules, under the emulator."""
    return count if CUDA else max(GRANULE, count // 64 // GRANULE * GRANULE)


def synchronize() -> None:
    """Waits for all work of the current device."""
    if CUDA:
        torch.cuda.synchronize()


def raw(tensor: torch.Tensor) -> torch.Tensor:
    """The bytes of a contiguous tensor, as a view."""
    return tensor.detach().reshape(-1).view(torch.uint8)


def fill(tensor: torch.Tensor, seed: int) -> torch.Tensor:
    """Gives ``tensor`` contents in which each byte depends on its place and ``seed``.

    To be called outside of scopes: it makes tensors of its own.
    """
    target = raw(tensor)
    for start, piece in _pieces(target):
        piece.copy_(_bytes_at(start, piece.numel(), seed, target.device))
    return tensor


def holds(tensor: torch.Tensor, seed: int) -> bool:
    """Does ``tensor`` hold exactly what :func:`fill` gave it?"""
    target = raw(tensor)
    return all(
        torch.equal(piece, _bytes_at(start, piece.numel(), seed, target.device))
        for start, piece in _pieces(target)
    )


def expected_bytes(count: int, seed: int) -> bytes:
    """The first bytes of what :func:`fill` gives."""
    return bytes(_bytes_at(0, count, seed, torch.device("cpu")).tolist())


def make(tag: str, sizes: Sequence[int], *, on_sleep: str | None = None) -> list[torch.Tensor]:
    """One byte tensor of each size in a pool of ``tag``; the nth holds contents of seed n."""
    with cumem.use_memory_pool(tag, on_sleep=on_sleep):
        tensors = [torch.empty(size, dtype=torch.uint8, device=DEVICE) for size in sizes]
    for seed, tensor in enumerate(tensors):
        fill(tensor, seed)
    return tensors


def intact(tensors: Sequence[torch.Tensor]) -> bool:
    """Do the tensors of :func:`make` hold what they were given?"""
    return all(holds(tensor, seed) for seed, tensor in enumerate(tensors))


def addresses(tensors: Sequence[torch.Tensor]) -> list[int]:
    """Where the tensors are."""
    return [tensor.data_ptr() for tensor in tensors]


def segments_of(tag: str) -> int:
    """How many segments a tag has."""
    return sum(known.segments for known in cumem.stats().tags if known.tag == tag)


def in_thread(call: Callable[[], object], name: str = "another") -> object:
    """What ``call`` returns on a thread of its own; what it raises is raised here."""
    result: list[object] = []
    failure: list[BaseException] = []

    def body() -> None:
        try:
            result.append(call())
        except BaseException as error:  # noqa: BLE001 - handed to the caller
            failure.append(error)

    thread = threading.Thread(target=body, name=name)
    thread.start()
    thread.join()
    if failure:
        raise failure[0]
    return result[0]


def capture(
    body: Callable[[], object],
    *,
    pool: Any = None,
    stream: torch.cuda.Stream | None = None,
) -> torch.cuda.CUDAGraph:
    """A CUDA graph of what ``body`` does on ``stream``; ``pool`` is the id of a pool."""
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, pool=pool, stream=stream):
        body()
    return graph


def warm(body: Callable[[], object], stream: torch.cuda.Stream) -> None:
    """Runs ``body`` on ``stream`` as it is, so that libraries set up outside of a capture."""
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        body()
    torch.cuda.current_stream().wait_stream(stream)
    torch.cuda.synchronize()


def _pieces(target: torch.Tensor) -> Iterator[tuple[int, torch.Tensor]]:
    for start in range(0, target.numel(), _STEP):
        yield start, target[start : start + _STEP]


def _bytes_at(start: int, count: int, seed: int, device: torch.device) -> torch.Tensor:
    """Bytes at places start, start + 1, ...: made as words of eight, each a mix of its place."""
    first = start // _WORD  # pieces start at whole words
    words = -(-count // _WORD)
    mixed = torch.arange(first, first + words, dtype=torch.int64, device=device)
    mixed = (mixed + (seed + 1) * 0x9E3779B97F) * 0x2545F4914F6CDD1D
    mixed = (mixed ^ (mixed >> 29)) * 0x106689D45497FDB5
    return (mixed ^ (mixed >> 32)).view(torch.uint8)[:count]
