"""What does the text server need of a model?"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch

from cumem.loading import Loaded

_BYTES = 256


class TextModel(Protocol):
    """A causal language model for one sequence at a time.

    Attributes:
        title: what it is, for people.
        stop_tokens: a text ends with one of these.
        asks_the_host: a step decides something on the host by what is on the device; then it
            cannot be captured.
        most_tokens: the longest text that it was made for; None: it names no limit.
    """

    title: str
    stop_tokens: frozenset[int]
    asks_the_host: bool
    most_tokens: int | None

    def build(self, device: torch.device) -> torch.nn.Module:
        """The model, with memory of its own on ``device`` and no contents."""
        ...

    def load(self, module: torch.nn.Module) -> Loaded:
        """Fills it in place from a checkpoint."""
        ...

    def make_cache(self, module: torch.nn.Module, tokens: int) -> list[torch.Tensor]:
        """A static KV cache for ``tokens`` tokens: its tensors, undefined."""
        ...

    def rewind(self) -> None:
        """The next tokens are the first of a text."""
        ...

    def logits(
        self, module: torch.nn.Module, tokens: torch.Tensor, positions: torch.Tensor
    ) -> torch.Tensor:
        """Logits [vocabulary] after ``tokens`` [1, n] at ``positions`` [n].

        Writes to the cache. Unless it ``asks_the_host``, nothing of it depends on the
        contents of ``positions`` on the host, so that a captured graph can go on from token
        to token.
        """
        ...

    def encode(self, text: str) -> list[int]: ...

    def decode(self, tokens: Sequence[int]) -> str:
        """The text of tokens; U+FFFD for what is none, or a letter that is not whole."""
        ...


def encode_bytes(text: str) -> list[int]:
    """For a model without a tokenizer: a token a byte of UTF-8."""
    return list(text.encode())


def decode_bytes(tokens: Sequence[int]) -> str:
    """Bytes as text where they are some; other tokens by their number."""
    text, run = [], bytearray()
    for token in tokens:
        if token < _BYTES:
            run.append(token)
        else:
            text += [run.decode(errors="replace"), f"<{token}>"]
            run.clear()
    return "".join([*text, run.decode(errors="replace")])
