"""What is put to sleep, how is it changed, and how is it proved to be the same?"""

from __future__ import annotations

import math
import random
from collections.abc import Iterator, Sequence

import torch
from settings import MIB

_WIDTHS = (4096, 2048, 1024, 512, 256)
_LAYERS_AT_LEAST = 16
_PIECE = 8 * MIB  # words that are checked at once
_WORD = 8

Shape = tuple[int, ...]


def llama_shapes(target_bytes: int) -> list[Shape]:
    """Shapes of bf16 weights like Llama's, of about ``target_bytes`` in all.

    A token table, then per layer fused query-key-value, output, fused gate-up and
    down projections and two norms in one tensor, then a norm and the output table. At
    16 GiB: width 4096, 35 layers, 178 tensors of 8 KiB to 992 MiB.
    """
    for width in _WIDTHS:
        ends, layer = _ends(width), _layer(width)
        layers = round((target_bytes / 2 - _elements(ends)) / _elements(layer))
        if layers >= _LAYERS_AT_LEAST:
            break
    layers = max(1, layers)
    return [ends[0], *(shape for _ in range(layers) for shape in layer), *ends[1:]]


def small_shapes(count: int) -> list[Shape]:
    """Shapes of ``count`` bf16 tensors of 1 KiB to 2 MiB, log-uniform, the same at each call."""
    source = random.Random(20_251)
    low, high = math.log(1 << 10), math.log(2 << 20)
    return [(round(math.exp(source.uniform(low, high)) / _WORD) * 4,) for _ in range(count)]


def _layer(width: int) -> list[Shape]:
    hidden = 7 * width // 2
    return [
        (3 * width // 2, width),
        (width, width),
        (2 * hidden, width),
        (width, hidden),
        (2, width),
    ]


def _ends(width: int) -> list[Shape]:
    words = 31 * width
    return [(words, width), (width,), (words, width)]


def _elements(shapes: Sequence[Shape]) -> int:
    return sum(math.prod(shape) for shape in shapes)


def bytes_of(tensors: Sequence[torch.Tensor]) -> int:
    """Bytes that the tensors hold."""
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def words_of(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor's memory as 64-bit words."""
    return tensor.reshape(-1).view(torch.int64)


def fill_random(tensors: Sequence[torch.Tensor], seed: int = 1) -> None:
    """Random bits; the highest of each 64 is always zero."""
    if not tensors:
        return
    generator = torch.Generator(device=tensors[0].device).manual_seed(seed)
    for tensor in tensors:
        words_of(tensor).random_(generator=generator)


def fill_gaussian(tensors: Sequence[torch.Tensor], seed: int = 1) -> None:
    """Values as weights have them: normal, of deviation 0.02."""
    if not tensors:
        return
    generator = torch.Generator(device=tensors[0].device).manual_seed(seed)
    for tensor in tensors:
        tensor.normal_(0.0, 0.02, generator=generator)


FILLS = {"random": fill_random, "gaussian": fill_gaussian}


def chosen_share(count: int, percent: int, turn: int) -> list[int]:
    """Indices of ``percent`` % of the tensors, spread evenly, other ones at each turn.

    At least one, unless there is none or ``percent`` is 0.
    """
    chosen = [at for at in range(count) if (at + turn) * percent % 100 < percent]
    return chosen or ([turn % count] if count and percent else [])


def change(tensors: Sequence[torch.Tensor], percent: int, turn: int) -> int:
    """Changes every byte of ``percent`` % of the tensors; returns the bytes changed.

    No byte of the mask is zero, so every byte really differs; masks differ from turn
    to turn, so no earlier contents come back.
    """
    mask_bytes = bytes(1 + (37 * turn + 59 * place) % 255 for place in range(_WORD))
    mask = int.from_bytes(mask_bytes, "little", signed=True)
    chosen = [tensors[index] for index in chosen_share(len(tensors), percent, turn)]
    for tensor in chosen:
        words_of(tensor).bitwise_xor_(mask)
    return bytes_of(chosen)


def checksums(tensors: Sequence[torch.Tensor]) -> list[int]:
    """One number for each tensor, computed where it is, that depends on every word and its place.

    Each word is multiplied by an odd number made from its place, modulo 2**64: a
    single word that differs always changes the sum.
    """
    sums = [_checksum(words_of(tensor)) for tensor in tensors]
    return [int(value) for value in torch.stack(sums).tolist()] if sums else []


def _checksum(words: torch.Tensor) -> torch.Tensor:
    total = torch.zeros((), dtype=torch.int64, device=words.device)
    for start, piece in _pieces(words):
        place = torch.arange(start, start + piece.numel(), device=words.device)
        factor = place.mul_(0x2545F4914F6CDD1D).bitwise_or_(1)
        total += factor.mul_(piece).sum()
    return total


def _pieces(words: torch.Tensor) -> Iterator[tuple[int, torch.Tensor]]:
    for start in range(0, words.numel(), _PIECE):
        yield start, words[start : start + _PIECE]
