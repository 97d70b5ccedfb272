"""How is a text made, token by token, with all its memory in pools?

Weights, KV cache and what a captured graph keeps sleep and wake as tags of their own. On
a GPU a decode step is one replay of a graph; under the emulator, for a model that asks the host,
and where no graph is wanted, it is the same step, called.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch

import cumem
from cumem.serving.texts import TextModel

WEIGHTS, CACHE, GRAPH = "weights", "kv_cache", "cuda_graph"
_WARM_STEPS = 3  # torch's own advice: libraries set themselves up in the first calls


class TextEngine:
    """One model, one text at a time; not for several threads at once.

    Args:
        model: what to run.
        most_tokens: the longest text, prompt included: the size of the KV cache.
        graph: capture the decode step where that can be done.
    """

    def __init__(self, model: TextModel, most_tokens: int, *, graph: bool = True) -> None:
        self.model, self.most_tokens = model, most_tokens
        device = self._device = cumem.default_device()
        with cumem.use_memory_pool(WEIGHTS):
            self.module = model.build(device)
        self.loaded = model.load(self.module)
        cumem.keep(list(self.module.buffers()))  # a checkpoint need not have them
        with cumem.use_memory_pool(CACHE):
            self._cache = model.make_cache(self.module, most_tokens)
            self._token = torch.zeros(1, 1, dtype=torch.long, device=device)
            self._position = torch.zeros(1, dtype=torch.long, device=device)
        self._epoch = -1
        self._clear_if_lost()
        self._graph = self._capture() if graph and _can_capture(model, device) else None

    def outside(self) -> list[str]:
        """Names of parameters and buffers that do not sleep."""
        return cumem.covered(self.module, WEIGHTS)

    def restore(self, tags: frozenset[str]) -> None:
        """Loads the weights again, where a sleep has discarded them; for a controller."""
        if WEIGHTS in tags:
            self.loaded = self.model.load(self.module)

    def check(self, tokens: Sequence[int]) -> None:
        """Raises ValueError where a prompt is empty, or leaves no room for another token."""
        if not 0 < len(tokens) < self.most_tokens:
            most = self.most_tokens - 1
            raise ValueError(f"the prompt has {len(tokens)} tokens; it must have 1 to {most}")

    def begin(self, tokens: Sequence[int]) -> int:
        """Reads the prompt; returns the first token after it."""
        self.check(tokens)
        with torch.inference_mode():
            self._clear_if_lost()
            self.model.rewind()
            prompt = torch.tensor([tokens], device=self._device)
            positions = torch.arange(len(tokens), device=self._device)
            logits = self.model.logits(self.module, prompt, positions)
            self._token.copy_(logits.argmax().view(1, 1))
            self._position.fill_(len(tokens))
        return int(self._token)

    def step(self) -> int:
        """The next token. At most ``most_tokens`` in all, those of the prompt included."""
        if self._graph is not None:
            self._graph.replay()
        else:
            self._advance()
        return int(self._token)

    def generate(self, tokens: Sequence[int], most: int) -> Iterator[int]:
        """Up to ``most`` tokens after the prompt, fewer where the text or the cache ends."""
        left = min(most, self.most_tokens - len(tokens))
        token = self.begin(tokens)
        while token not in self.model.stop_tokens:
            yield token
            left -= 1
            if left <= 0:
                return
            token = self.step()

    @torch.inference_mode()
    def _advance(self) -> None:
        logits = self.model.logits(self.module, self._token, self._position)
        self._token.copy_(logits.argmax().view(1, 1))
        self._position.add_(1)

    def _clear_if_lost(self) -> None:
        """Undefined bytes may be NaN, which a mask does not hide: 0 times NaN is NaN."""
        epoch = cumem.epoch(CACHE)
        if epoch != self._epoch:
            for part in self._cache:
                part.zero_()
            self._token.zero_()
            self._epoch = epoch

    def _capture(self) -> torch.cuda.CUDAGraph:
        graph, stream = torch.cuda.CUDAGraph(), torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(_WARM_STEPS):
                self.model.rewind()
                self._position.zero_()
                self._advance()
        torch.cuda.current_stream().wait_stream(stream)
        with cumem.graph_pool(GRAPH) as pool:
            handle: Any = pool.id
            with torch.cuda.graph(graph, pool=handle, stream=stream):
                self._advance()
        return graph


def _can_capture(model: TextModel, device: torch.device) -> bool:
    return device.type == "cuda" and not model.asks_the_host
