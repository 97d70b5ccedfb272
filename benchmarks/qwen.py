"""What is Qwen3.5-2B made of, and what was published about loading it?

The architecture is that of the public model: a text model of 24 layers, three of linear
attention to one of full attention, and a vision tower. Its checkpoint also holds a head
that predicts several tokens, which the model class leaves out, and two kinds of small
tensors in 32 bits; with those the payload is the published one, to the byte.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

_DTYPE = torch.float16
_WIDE = ("A_log", "linear_attn.norm.weight")  # kept in 32 bits

SIZES: dict[str, dict[str, Any]] = {
    "2b": {
        "text": {
            "vocab_size": 248_320,
            "hidden_size": 2048,
            "intermediate_size": 6144,
            "num_hidden_layers": 24,
            "num_attention_heads": 8,
            "num_key_value_heads": 2,
            "head_dim": 256,
            "linear_num_key_heads": 16,
            "linear_num_value_heads": 16,
        },
        "vision": {
            "depth": 24,
            "hidden_size": 1024,
            "intermediate_size": 4096,
            "num_heads": 16,
            "out_hidden_size": 2048,
        },
    },
    "tiny": {  # for a test of the script
        "text": {
            "vocab_size": 512,
            "hidden_size": 64,
            "intermediate_size": 128,
            "num_hidden_layers": 4,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 16,
            "linear_num_key_heads": 2,
            "linear_num_value_heads": 2,
            "linear_key_head_dim": 16,
            "linear_value_head_dim": 16,
        },
        "vision": {
            "depth": 2,
            "hidden_size": 64,
            "intermediate_size": 128,
            "num_heads": 4,
            "out_hidden_size": 64,
        },
    },
}

PUBLISHED_PAYLOAD = 4_548_144_832
EXTRA_ROW = "after adopt"
# vLLM 0.27.0, torch 2.13.0+cu130, an RTX 2080 Ti, fp16: live, reserved, tracked, segments, used.
PUBLISHED = {
    "before model constructor": ("2.04", "22.00", "0.00", "0", "1,216.69"),
    "after constructor": ("4,352.01", "4,970.00", "4,948.00", "125", "6,164.69"),
    "after checkpoint copy": ("4,352.01", "4,970.00", "4,948.00", "125", "6,164.69"),
    "after post-load hooks": ("4,352.00", "4,970.00", "4,948.00", "125", "6,164.69"),
}


def write_checkpoint(folder: Path, size: dict[str, Any]) -> int:
    """Writes config.json and model.safetensors with random weights; returns payload bytes."""
    from transformers import Qwen3_5Config, Qwen3_5ForConditionalGeneration

    config = Qwen3_5Config(
        text_config={**size["text"], "tie_word_embeddings": True},
        vision_config=size["vision"],
        tie_word_embeddings=True,
        architectures=["Qwen3_5ForConditionalGeneration"],
    )
    with torch.device("meta"):
        model = Qwen3_5ForConditionalGeneration(config)
    model.tie_weights()
    shapes = {name: tuple(tensor.shape) for name, tensor in model.named_parameters()}
    source = torch.Generator().manual_seed(0)
    shapes |= _prediction_head(shapes, size["text"])
    tensors = {name: _random(name, shape, source) for name, shape in shapes.items()}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    written = json.loads(config.to_json_string(use_diff=False))
    (folder / "config.json").write_text(json.dumps(written, indent=2))
    return sum(tensor.nbytes for tensor in tensors.values())


def _prediction_head(
    shapes: dict[str, tuple[int, ...]], text: dict[str, Any]
) -> dict[str, tuple[int, ...]]:
    """One layer of full attention behind a projection of two hidden states."""
    hidden, last = text["hidden_size"], text["num_hidden_layers"] - 1
    layer = f"layers.{last}."
    head = {
        f"mtp.layers.0.{name.partition(layer)[2]}": shape
        for name, shape in shapes.items()
        if f"language_model.{layer}" in name
    }
    norms = ("pre_fc_norm_embedding", "pre_fc_norm_hidden", "norm")
    return {
        **head,
        "mtp.fc.weight": (hidden, 2 * hidden),
        **{f"mtp.{name}.weight": (hidden,) for name in norms},
    }


def _random(name: str, shape: tuple[int, ...], source: torch.Generator) -> torch.Tensor:
    dtype = torch.float32 if name.endswith(_WIDE) else _DTYPE
    return torch.empty(shape, dtype=dtype).normal_(0.0, 0.02, generator=source)
