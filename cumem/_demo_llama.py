"""What model does the demo run when it is given none?

A Llama-like transformer in plain torch, as large as asked for: its weights are
random, its parts and shapes are those of real models.
"""

from __future__ import annotations

import math
import os
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import nn
from torch.nn import functional

from cumem.loading import Loaded, load_into

_DTYPE = torch.bfloat16
_ROTARY_BASE = 500_000.0
_EPSILON = 1e-5
_BATCH, _PROMPT, _STEPS = 2, 24, 8  # sequences, their tokens, and tokens to generate
_PART = 1 << 22  # elements with one seed


@dataclass(frozen=True)
class Shape:
    """The sizes of a model; ``tied``: the embedding is the output projection too."""

    vocabulary: int
    hidden: int
    heads: int
    kv_heads: int
    head_size: int
    intermediate: int
    tied: bool
    layers: int = 1

    @property
    def layer_parameters(self) -> int:
        attention = 2 * self.hidden * (self.heads + self.kv_heads) * self.head_size
        return attention + 3 * self.hidden * self.intermediate + 2 * self.hidden

    @property
    def parameters(self) -> int:
        ends = self.vocabulary * self.hidden * (1 if self.tied else 2) + self.hidden
        return ends + self.layers * self.layer_parameters

    @property
    def bytes(self) -> int:
        return self.parameters * _DTYPE.itemsize

    @property
    def token_bytes(self) -> int:
        """Bytes of keys and values for one token, all layers."""
        return 2 * self.layers * self.kv_heads * self.head_size * _DTYPE.itemsize


# Widths of real models, from the widest; all but the widest tie their embedding.
_WIDTHS = (
    Shape(128_256, 4096, 32, 8, 128, 14_336, tied=False),
    Shape(128_256, 2048, 32, 8, 64, 8_192, tied=True),
    Shape(49_152, 960, 15, 5, 64, 2_560, tied=True),
    Shape(32_000, 512, 8, 4, 64, 1_376, tied=True),
    Shape(2_048, 256, 4, 2, 64, 704, tied=True),
)
_LEAST_LAYERS = 4


def shape_of(weight_bytes: int) -> Shape:
    """The widest shape with at least four layers that fits into ``weight_bytes``.

    Where none does, it is the narrowest, with one layer at the least.
    """
    for width in _WIDTHS:
        ends = width.parameters - width.layer_parameters
        layers = (weight_bytes // _DTYPE.itemsize - ends) // width.layer_parameters
        if layers >= _LEAST_LAYERS:
            return replace(width, layers=layers)
    return replace(_WIDTHS[-1], layers=max(1, layers))


class Projection(nn.Module):
    """``x @ weight.T``. The weight is undefined until a checkpoint fills it."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(outputs, inputs, dtype=_DTYPE))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return functional.linear(x, self.weight)


class Attention(nn.Module):
    """Grouped-query attention over a cache that is given."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.head_size = shape.head_size
        self.q_proj = Projection(shape.hidden, shape.heads * shape.head_size)
        self.k_proj = Projection(shape.hidden, shape.kv_heads * shape.head_size)
        self.v_proj = Projection(shape.hidden, shape.kv_heads * shape.head_size)
        self.o_proj = Projection(shape.heads * shape.head_size, shape.hidden)

    def forward(
        self, x: torch.Tensor, angles: torch.Tensor, cache: torch.Tensor, start: int
    ) -> torch.Tensor:
        """Writes keys and values to the cache from position ``start`` on, then attends."""
        end = start + x.shape[1]
        cache[0, :, :, start:end] = rotate(self.heads(self.k_proj(x)), angles)
        cache[1, :, :, start:end] = self.heads(self.v_proj(x))
        mixed = functional.scaled_dot_product_attention(
            rotate(self.heads(self.q_proj(x)), angles),
            cache[0, :, :, :end],
            cache[1, :, :, :end],
            is_causal=start == 0,  # later steps have one token, which sees all before it
            enable_gqa=True,
        )
        merged: torch.Tensor = self.o_proj(mixed.transpose(1, 2).flatten(2))
        return merged

    def heads(self, x: torch.Tensor) -> torch.Tensor:
        """[batch, tokens, width] to [batch, heads, tokens, head size]."""
        split: torch.Tensor = x.unflatten(-1, (-1, self.head_size)).transpose(1, 2)
        return split


def rotate(x: torch.Tensor, angles: torch.Tensor) -> torch.Tensor:
    """Rotary position embedding, in float32; ``angles`` is [tokens, head size / 2]."""
    left, right = x.float().chunk(2, dim=-1)
    cos, sin = angles.cos(), angles.sin()
    return torch.cat((left * cos - right * sin, right * cos + left * sin), dim=-1).to(x.dtype)


class FeedForward(nn.Module):
    """SwiGLU."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.gate_proj = Projection(shape.hidden, shape.intermediate)
        self.up_proj = Projection(shape.hidden, shape.intermediate)
        self.down_proj = Projection(shape.intermediate, shape.hidden)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        gated: torch.Tensor = self.down_proj(functional.silu(self.gate_proj(x)) * self.up_proj(x))
        return gated


class Layer(nn.Module):
    """Attention and feed-forward, each after a norm and beside a residual."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.input_layernorm = nn.RMSNorm(shape.hidden, _EPSILON, dtype=_DTYPE)
        self.self_attn = Attention(shape)
        self.post_attention_layernorm = nn.RMSNorm(shape.hidden, _EPSILON, dtype=_DTYPE)
        self.mlp = FeedForward(shape)

    def forward(
        self, x: torch.Tensor, angles: torch.Tensor, cache: torch.Tensor, start: int
    ) -> torch.Tensor:
        x = x + self.self_attn(self.input_layernorm(x), angles, cache, start)
        result: torch.Tensor = x + self.mlp(self.post_attention_layernorm(x))
        return result


class Llama(nn.Module):
    """The whole model; weights are undefined until a checkpoint fills them."""

    inverse_frequencies: torch.Tensor

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape = shape
        self.embed_tokens = Projection(shape.hidden, shape.vocabulary)
        self.layers = nn.ModuleList(Layer(shape) for _ in range(shape.layers))
        self.norm = nn.RMSNorm(shape.hidden, _EPSILON, dtype=_DTYPE)
        self.lm_head = (
            self.embed_tokens if shape.tied else Projection(shape.hidden, shape.vocabulary)
        )
        exponents = torch.arange(0, shape.head_size, 2, dtype=torch.float32) / shape.head_size
        frequencies = torch.exp(exponents * -math.log(_ROTARY_BASE))
        self.register_buffer("inverse_frequencies", frequencies, persistent=False)

    def forward(self, tokens: torch.Tensor, cache: list[torch.Tensor], start: int) -> torch.Tensor:
        """Logits [batch, vocabulary] for the token after ``tokens`` [batch, tokens]."""
        positions = torch.arange(start, start + tokens.shape[1], device=tokens.device)
        angles = torch.outer(positions.float(), self.inverse_frequencies)
        x = functional.embedding(tokens, self.embed_tokens.weight)
        for layer, part in zip(self.layers, cache, strict=True):
            x = layer(x, angles, part, start)
        logits: torch.Tensor = self.lm_head(self.norm(x[:, -1]))
        return logits


class LlamaModel:
    """The demo's own model, of about ``weight_bytes`` bytes."""

    def __init__(self, weight_bytes: int) -> None:
        self.shape = shape_of(weight_bytes)
        self.weight_bytes = self.shape.bytes
        self.title = (
            f"a Llama-like model with random weights: {self.shape.layers} layer(s) of width "
            f"{self.shape.hidden}, {self.shape.parameters / 1e6:.1f} million parameters"
        )

    def build(self, device: torch.device) -> nn.Module:
        with device:
            return Llama(self.shape).eval()

    def load(self, model: nn.Module) -> Loaded:
        """Saves random weights to a private folder, and loads what is there."""
        with tempfile.TemporaryDirectory(prefix="cumem-demo-") as folder:
            save_random(self.shape, Path(folder) / "model.safetensors")
            return load_into(model, folder)

    def make_cache(self, device: torch.device, most_bytes: int) -> list[torch.Tensor]:
        """Keys and values of each layer, undefined: [2, batch, heads, tokens, head size]."""
        shape = self.shape
        tokens = max(_PROMPT + _STEPS, most_bytes // (shape.token_bytes * _BATCH))
        sizes = (2, _BATCH, shape.kv_heads, tokens, shape.head_size)
        return [torch.empty(sizes, dtype=_DTYPE, device=device) for _ in range(shape.layers)]

    def run(self, model: nn.Module, cache: list[torch.Tensor]) -> torch.Tensor:
        """Logits [steps, batch, vocabulary]: of a prompt, then of the likeliest next tokens."""
        tokens = torch.arange(_BATCH * _PROMPT, device=cache[0].device)
        prompt = (tokens * 31 % self.shape.vocabulary).view(_BATCH, _PROMPT)
        logits = [model(prompt, cache, 0)]
        for step in range(_STEPS):
            token = logits[-1].argmax(-1, keepdim=True)
            logits.append(model(token, cache, _PROMPT + step))
        return torch.stack(logits)

    def describe(self, output: torch.Tensor) -> str:
        tokens = output[:, 0].argmax(-1).tolist()
        return f"a prompt of {_PROMPT} tokens, then {_STEPS} steps; tokens {tokens}"


def save_random(shape: Shape, file: Path) -> None:
    """Writes a checkpoint of random weights, the same for the same shape."""
    with torch.device("meta"):
        likes = dict(Llama(shape).named_parameters())
    tensors = {name: torch.empty(like.shape, dtype=like.dtype) for name, like in likes.items()}
    _fill_random(list(tensors.values()))
    save_file(tensors, file)


def _fill_random(tensors: Sequence[torch.Tensor]) -> None:
    """With all processors: one took 40 s for 2 GiB on a server with a GPU."""
    parts = [
        (part, 1.0 if tensor.dim() == 1 else 0.0)  # the scales of norms are about 1
        for tensor in tensors
        for part in tensor.view(-1).split(_PART)
    ]

    def fill(seed: int) -> None:
        part, center = parts[seed]
        part.normal_(center, 0.02, generator=torch.Generator().manual_seed(seed))

    with ThreadPoolExecutor(os.cpu_count()) as threads:
        list(threads.map(fill, range(len(parts))))
