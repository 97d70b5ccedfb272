"""Does the benchmark of model loading run to the end, with what the published table shows?"""

from __future__ import annotations

import importlib
import json
import sys
from pathlib import Path

import pytest

from cumem.testing import emulated_driver

BENCHMARKS = Path(__file__).parent.parent / "benchmarks"

sys.path.append(str(BENCHMARKS))  # they are scripts, which import each other by name

qwen = importlib.import_module("qwen")


def test_a_tiny_model_has_every_boundary_and_flat_counters(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("transformers.models.qwen3_5")
    module = importlib.import_module("model_loading")
    file = tmp_path / "loading.json"
    with emulated_driver(capacity_bytes=256 << 20):
        status = module.main(["--size", "tiny", "--folder", str(tmp_path), "--json", str(file)])
    result = json.loads(file.read_text())
    assert [mark["label"] for mark in result["marks"]][:4] == list(qwen.PUBLISHED)
    assert (status, set(result["checks"].values())) == (0, {True})
    assert result["payload_bytes"] > result["module_bytes"]
    assert "EMULATED DRIVER" in capsys.readouterr().out
    assert list(tmp_path.iterdir()) == [file]


def test_the_full_size_has_the_published_payload() -> None:
    """Counted from shapes: the model, the prediction head, and what is kept in 32 bits."""
    transformers = pytest.importorskip("transformers")
    pytest.importorskip("transformers.models.qwen3_5")
    torch = importlib.import_module("torch")
    size = qwen.SIZES["2b"]
    config = transformers.Qwen3_5Config(
        text_config={**size["text"], "tie_word_embeddings": True},
        vision_config=size["vision"],
        tie_word_embeddings=True,
    )
    with torch.device("meta"):
        model = transformers.Qwen3_5ForConditionalGeneration(config)
    model.tie_weights()
    shapes = {name: tuple(tensor.shape) for name, tensor in model.named_parameters()}
    shapes |= qwen._prediction_head(shapes, size["text"])
    payload = sum(
        torch.Size(shape).numel() * (4 if name.endswith(qwen._WIDE) else 2)
        for name, shape in shapes.items()
    )
    assert payload == qwen.PUBLISHED_PAYLOAD
