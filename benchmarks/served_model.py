"""Which model does the server run in the benchmark, and where is its folder?

A Llama with the widths of a public one of 3 billion parameters, and as many layers as
fit; its weights are random, so that no two pieces of memory are the same.
"""

from __future__ import annotations

import json
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import torch
from safetensors.torch import save_file

from cumem._demo_llama import Llama, Shape

_MEMORY = Path("/dev/shm")
_ROOM = 1.1  # of the checkpoint's bytes, for the folder to be in memory
_LEAST_LAYERS = 2

# The output is not tied to the embedding: with random weights a tied one says its input again.
_WIDTHS = (
    Shape(128_256, 3072, 24, 8, 128, 8192, tied=False),
    Shape(2_048, 256, 4, 2, 64, 704, tied=False),
    Shape(512, 64, 4, 2, 16, 176, tied=False),
)


def shape_for(target_bytes: int) -> Shape:
    """The widest shape of which two layers fit into ``target_bytes``, else two of the narrowest."""
    for width in _WIDTHS:
        ends = width.bytes - width.layer_parameters * 2
        layers = (target_bytes - ends) // (width.layer_parameters * 2)
        if layers >= _LEAST_LAYERS:
            return replace(width, layers=layers)
    return replace(_WIDTHS[-1], layers=_LEAST_LAYERS)


def write_model(folder: Path, shape: Shape, device: torch.device) -> None:
    """Writes ``config.json`` and ``model.safetensors``; the same weights at each run.

    There is no tokenizer: the server then takes bytes of UTF-8 for tokens. No token ends a
    text, so that each has as many as were asked for.

    Args:
        device: where the random numbers are made; a GPU is faster.
    """
    with torch.device("meta"):
        likes = dict(Llama(shape).named_parameters())
    source = torch.Generator(device).manual_seed(0)
    weights = {_their_name(name): _random(like, source) for name, like in likes.items()}
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    (folder / "config.json").write_text(json.dumps(_config(shape)), encoding="utf-8")


def _their_name(name: str) -> str:
    return name if name.startswith("lm_head.") else f"model.{name}"


def _random(like: torch.Tensor, source: torch.Generator) -> torch.Tensor:
    made = torch.empty(like.shape, dtype=like.dtype, device=source.device)
    if like.dim() == 1:
        return made.fill_(1.0).cpu()
    return made.normal_(0.0, like.shape[-1] ** -0.5, generator=source).cpu()


def _config(shape: Shape) -> dict[str, object]:
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": shape.vocabulary,
        "hidden_size": shape.hidden,
        "intermediate_size": shape.intermediate,
        "num_hidden_layers": shape.layers,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv_heads,
        "head_dim": shape.head_size,
        "tie_word_embeddings": shape.tied,
        "max_position_embeddings": 131_072,
        "rope_theta": 500_000.0,
        "dtype": "bfloat16",
        "bos_token_id": None,
        "eos_token_id": None,
        "pad_token_id": None,
    }


@contextmanager
def model_folder(shape: Shape, device: torch.device, parent: Path | None) -> Iterator[Path]:
    """A folder with the model, which goes when the block ends.

    Args:
        parent: where; None: in memory, where that has room, else where temporary files go.
    """
    if parent is None and _MEMORY.is_dir():
        free = shutil.disk_usage(_MEMORY).free
        parent = _MEMORY if free > shape.bytes * _ROOM else None
    with tempfile.TemporaryDirectory(dir=parent, prefix="bench_serve-") as name:
        write_model(Path(name), shape, device)
        if device.type == "cuda":
            torch.cuda.empty_cache()  # or the server would have less
        yield Path(name)
