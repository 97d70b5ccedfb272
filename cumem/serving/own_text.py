"""Which model does the server run when it is given none?

The Llama-like one of the demo, with random weights, over a static KV cache.
"""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import cast

import torch
from torch import nn
from torch.nn import functional

from cumem._demo_llama import Attention, Layer, Llama, rotate, save_random, shape_of
from cumem.loading import Loaded, load_into
from cumem.serving import texts


class StaticLlama(nn.Module):
    """A Llama whose positions are a tensor, so that a captured graph can go on."""

    def __init__(self, llama: Llama) -> None:
        super().__init__()
        self.llama = llama

    def forward(
        self, tokens: torch.Tensor, cache: list[torch.Tensor], positions: torch.Tensor
    ) -> torch.Tensor:
        """Logits [vocabulary] after ``tokens`` [1, n] at ``positions`` [n]."""
        llama = self.llama
        angles = torch.outer(positions.float(), llama.inverse_frequencies)
        places = torch.arange(cache[0].shape[3], device=positions.device)
        visible = places <= positions[:, None]
        x = functional.embedding(tokens, llama.embed_tokens.weight)
        layers = cast("list[Layer]", list(llama.layers))
        for layer, part in zip(layers, cache, strict=True):
            normed = layer.input_layernorm(x)
            _store(layer.self_attn, part, normed, angles, positions)
            x = x + _attend(layer.self_attn, part, normed, angles, visible)
            x = x + layer.mlp(layer.post_attention_layernorm(x))
        logits: torch.Tensor = llama.lm_head(llama.norm(x[:, -1]))[0]
        return logits


def _store(
    attention: Attention,
    part: torch.Tensor,
    x: torch.Tensor,
    angles: torch.Tensor,
    positions: torch.Tensor,
) -> None:
    """Writes keys and values of these positions to the cache."""
    part[0].index_copy_(2, positions, rotate(attention.heads(attention.k_proj(x)), angles))
    part[1].index_copy_(2, positions, attention.heads(attention.v_proj(x)))


def _attend(
    attention: Attention,
    part: torch.Tensor,
    x: torch.Tensor,
    angles: torch.Tensor,
    visible: torch.Tensor,
) -> torch.Tensor:
    queries = rotate(attention.heads(attention.q_proj(x)), angles)
    mixed = functional.scaled_dot_product_attention(
        queries, part[0], part[1], attn_mask=visible, enable_gqa=True
    )
    merged: torch.Tensor = attention.o_proj(mixed.transpose(1, 2).flatten(2))
    return merged


class OwnText:
    """A model of about ``weight_bytes`` bytes; a token is a byte, or a number."""

    stop_tokens: frozenset[int] = frozenset()
    asks_the_host = False
    most_tokens: int | None = None  # rotary positions, and weights of no meaning

    def __init__(self, weight_bytes: int) -> None:
        self._shape = shape_of(weight_bytes)
        self._cache: list[torch.Tensor] = []
        self.title = (
            f"a Llama-like model with random weights, "
            f"{self._shape.parameters / 1e6:.1f} million parameters"
        )

    def build(self, device: torch.device) -> nn.Module:
        with device:
            return StaticLlama(Llama(self._shape)).eval()

    def load(self, module: nn.Module) -> Loaded:
        assert isinstance(module, StaticLlama)
        with tempfile.TemporaryDirectory(prefix="cumem-serve-") as folder:
            save_random(self._shape, Path(folder) / "model.safetensors")
            return load_into(module.llama, folder)

    def make_cache(self, module: nn.Module, tokens: int) -> list[torch.Tensor]:
        """For each layer [2, 1, heads, tokens, head size]."""
        weight = next(module.parameters())
        sizes = (2, 1, self._shape.kv_heads, tokens, self._shape.head_size)
        self._cache = [
            torch.empty(sizes, dtype=weight.dtype, device=weight.device)
            for _ in range(self._shape.layers)
        ]
        return self._cache

    def rewind(self) -> None:
        """Nothing to do: positions say where to write, and hide what is behind."""

    def logits(
        self, module: nn.Module, tokens: torch.Tensor, positions: torch.Tensor
    ) -> torch.Tensor:
        result: torch.Tensor = module(tokens, self._cache, positions)
        return result

    def encode(self, text: str) -> list[int]:
        return texts.encode_bytes(text)

    def decode(self, tokens: Sequence[int]) -> str:
        return texts.decode_bytes(tokens)
