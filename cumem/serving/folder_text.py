"""How does the server run a Hugging Face model folder?

Built and filled as the demo does it, in one thread, so that everything is in a pool;
transformers' static cache, made at once and in its pool, holds keys and values.
"""

from __future__ import annotations

import importlib
import inspect
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from cumem._demo_folder import FolderModel
from cumem._demo_subject import DemoError
from cumem.loading import Loaded
from cumem.serving import texts

_TOKENIZER = ("tokenizer_config.json", "tokenizer.json", "tokenizer.model")  # any of them
_BY_LENGTH = {"dynamic", "longrope"}  # frequencies that transformers chooses at each step
_STRETCHED = {"linear", "dynamic", "yarn"}  # whose factor is not in max_position_embeddings


class FolderText:
    """A causal model of a folder with ``config.json`` and safetensors."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._model = FolderModel(folder)
        self.title = self._model.title
        self._transformers: Any = importlib.import_module("transformers")
        self._tokenizer = self._load_tokenizer()
        config = self._transformers.AutoConfig.from_pretrained(folder, local_files_only=True)
        text = config.get_text_config(decoder=True)
        self.stop_tokens = frozenset({*_stops(text.eos_token_id), *_told_stops(folder)})
        self.asks_the_host = any(way.get("rope_type") in _BY_LENGTH for way in _rotary_ways(text))
        self.most_tokens = _most_positions(text)
        self._cache: Any = None
        self._arguments: dict[str, Any] = {}

    def build(self, device: torch.device) -> torch.nn.Module:
        module: Any = self._model.build(device)
        if not (hasattr(module, "can_generate") and module.can_generate()):
            kind = type(module).__name__
            raise DemoError(f"{self._folder}: {kind} does not generate text; give a causal model")
        return module  # type: ignore[no-any-return]

    def load(self, module: torch.nn.Module) -> Loaded:
        return self._model.load(module)

    def make_cache(self, module: torch.nn.Module, tokens: int) -> list[torch.Tensor]:
        text = module.config.get_text_config(decoder=True)  # type: ignore[operator, union-attr]
        heads = getattr(text, "num_key_value_heads", None) or text.num_attention_heads
        width = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
        cache = self._transformers.StaticCache(config=text, max_cache_len=tokens)
        cache.layers = self._whole_layers(cache.layers, tokens)
        where = next(module.parameters())
        cache.early_initialization(
            batch_size=1,
            num_heads=heads,
            head_dim=width,
            dtype=where.dtype,
            device=where.device,
        )
        _require_counts(cache.layers, self._transformers.__version__)
        self._cache = cache
        self._arguments = {_cache_name(module): cache, "use_cache": True, "logits_to_keep": 1}
        return [tensor for layer in cache.layers for tensor in (layer.keys, layer.values)]

    def _whole_layers(self, layers: Sequence[Any], tokens: int) -> list[Any]:
        """Layers whose length is a tensor, and which have room for the whole text.

        One that slides counts its tokens on the host, where neither a captured graph nor a
        rewind can reach the count; the mask hides what is outside of the window.
        """
        kinds = importlib.import_module("transformers.cache_utils")
        for layer in layers:
            if type(layer) not in (kinds.StaticLayer, kinds.StaticSlidingWindowLayer):
                raise DemoError(
                    f"{self._folder}: the server keeps keys and values of attention, and this "
                    f"model needs a {type(layer).__name__}"
                )
        return [kinds.StaticLayer(max_cache_len=tokens) for _ in layers]

    def rewind(self) -> None:
        for layer in self._cache.layers:
            layer.cumulative_length.zero_()

    def logits(
        self, module: torch.nn.Module, tokens: torch.Tensor, positions: torch.Tensor
    ) -> torch.Tensor:
        found = module(input_ids=tokens, position_ids=positions.unsqueeze(0), **self._arguments)
        result: torch.Tensor = found.logits[0, -1]
        return result

    def encode(self, text: str) -> list[int]:
        if self._tokenizer is None:
            return texts.encode_bytes(text)
        return list(self._tokenizer(text)["input_ids"])

    def decode(self, tokens: Sequence[int]) -> str:
        if self._tokenizer is None:
            return texts.decode_bytes(tokens)
        # Unclean: a clean-up drops spaces that a client has been told already.
        unclean = {"clean_up_tokenization_spaces": False}
        return str(self._tokenizer.decode(tokens, skip_special_tokens=True, **unclean))

    def _load_tokenizer(self) -> Any:
        if not any((self._folder / name).exists() for name in _TOKENIZER):
            return None
        auto = self._transformers.AutoTokenizer
        return auto.from_pretrained(self._folder, local_files_only=True)


def _require_counts(layers: Sequence[Any], version: str) -> None:
    """Raises DemoError where the cache counts its tokens on the host: a graph would not."""
    if not all(isinstance(getattr(it, "cumulative_length", None), torch.Tensor) for it in layers):
        raise DemoError(
            f"transformers {version} counts the tokens of a static cache on the host; the "
            "server needs 5.4 or newer"
        )


def _told_stops(folder: Path) -> list[int]:
    """What ends a turn of a chat model is often told here, and not in its configuration."""
    file = folder / "generation_config.json"
    if not file.exists():
        return []
    try:
        return _stops(json.loads(file.read_text(encoding="utf-8")).get("eos_token_id"))
    except (ValueError, AttributeError) as error:
        raise DemoError(f"{file} is not a JSON object: {error}") from error


def _stops(stops: Any) -> list[int]:
    if stops is None:
        return []
    return list(stops) if isinstance(stops, (list, tuple)) else [stops]


def _rotary_ways(text: Any) -> list[dict[str, Any]]:
    """How positions are scaled; some models have one way for each kind of layer."""
    given = getattr(text, "rope_parameters", None) or getattr(text, "rope_scaling", None) or {}
    return [given, *(way for way in given.values() if isinstance(way, dict))]


def _most_positions(text: Any) -> int | None:
    """For how many tokens the model was made; None: its configuration names no limit."""
    named = (getattr(text, name, None) for name in ("max_position_embeddings", "max_seq_len"))
    most = next((value for value in named if isinstance(value, int) and value > 0), None)
    if most is None:
        return None
    stretched = (
        (way.get("original_max_position_embeddings") or most) * (way.get("factor") or 1)
        for way in _rotary_ways(text)
        if way.get("rope_type") in _STRETCHED
    )
    return int(max([most, *stretched]))


def _cache_name(module: torch.nn.Module) -> str:
    """Older releases of transformers call the argument ``past_key_values``."""
    names = inspect.signature(module.forward).parameters
    return "cache" if "cache" in names else "past_key_values"
