"""A stack of layers as Llama has them, in plain torch, with random weights."""

from __future__ import annotations

from typing import cast

import torch
from torch import nn
from torch.nn import functional

_WIDTHS = (4096, 2048, 1024, 512, 256)
_LAYERS_AT_LEAST = 4
_HEAD = 64
_DTYPE = torch.bfloat16


class Layer(nn.Module):
    """Attention and feed-forward, each after a norm and beside a residual."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.heads = width // _HEAD, width // _HEAD // 4
        inner = 7 * width // 2
        self.norm_1 = nn.RMSNorm(width, dtype=_DTYPE)
        self.qkv = nn.Linear(width, 3 * width // 2, bias=False, dtype=_DTYPE)
        self.out = nn.Linear(width, width, bias=False, dtype=_DTYPE)
        self.norm_2 = nn.RMSNorm(width, dtype=_DTYPE)
        self.gate_up = nn.Linear(width, 2 * inner, bias=False, dtype=_DTYPE)
        self.down = nn.Linear(inner, width, bias=False, dtype=_DTYPE)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[batch, tokens, width] to the same."""
        x = x + self._attend(self.norm_1(x))
        gate, up = self.gate_up(self.norm_2(x)).chunk(2, dim=-1)
        return x + cast(torch.Tensor, self.down(functional.silu(gate) * up))

    def _attend(self, x: torch.Tensor) -> torch.Tensor:
        queries, keys = self.heads
        split = self.qkv(x).unflatten(-1, (queries + 2 * keys, _HEAD)).transpose(1, 2)
        q, k, v = split.split((queries, keys, keys), dim=1)
        mixed = functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return cast(torch.Tensor, self.out(mixed.transpose(1, 2).flatten(2)))


class Stack(nn.Module):
    """Layers one after the other."""

    def __init__(self, width: int, layers: int) -> None:
        super().__init__()
        self.width = width
        self.layers = nn.ModuleList(Layer(width) for _ in range(layers))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


def build(target_bytes: int, device: torch.device) -> Stack:
    """A stack of about ``target_bytes``: the widest that has four layers or more."""
    for width in _WIDTHS:
        layers = round(target_bytes / layer_bytes(width))
        if layers >= _LAYERS_AT_LEAST:
            break
    with torch.device("meta"):
        shape = Stack(width, max(1, layers))
    return shape.to_empty(device=device)


def layer_bytes(width: int) -> int:
    """Bytes of one layer of that width."""
    with torch.device("meta"):
        layer = Layer(width)
    return sum(tensor.numel() * tensor.element_size() for tensor in layer.parameters())


@torch.no_grad()
def fill(stack: Stack) -> None:
    """Random weights of the scales that real ones have, the same at each call."""
    device = next(stack.parameters()).device
    generator = torch.Generator(device=device).manual_seed(1)
    for parameter in stack.parameters():
        center = 1.0 if parameter.dim() == 1 else 0.0  # the scales of norms
        parameter.normal_(center, 0.02, generator=generator)


def example(stack: Stack, tokens: int) -> torch.Tensor:
    """An input [1, tokens, width]."""
    device = next(stack.parameters()).device
    generator = torch.Generator(device=device).manual_seed(2)
    shape = (1, tokens, stack.width)
    return torch.empty(shape, dtype=_DTYPE, device=device).normal_(generator=generator)
