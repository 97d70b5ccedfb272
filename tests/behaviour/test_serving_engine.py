"""Is a text the same after a sleep, with all its memory in pools?"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import cumem
from cumem._demo_llama import Llama
from cumem._demo_subject import DemoError
from cumem.serving.engine import CACHE, GRAPH, WEIGHTS, TextEngine
from cumem.serving.own_text import OwnText, StaticLlama
from cumem.serving.texts import decode_bytes, encode_bytes

WORDS = "The weights went to sleep."
SMALL = 1 << 20


@pytest.fixture
def engine(driver: object) -> Iterator[TextEngine]:
    torch.set_num_threads(1)
    made = TextEngine(OwnText(SMALL), 64)
    yield made
    vars(made).clear()  # pytest holds the object longer than its memory may live


def logits(engine: TextEngine, steps: int = 4) -> torch.Tensor:
    """Of a prompt and the next tokens: they depend on every byte of weights and cache."""
    found = []
    advance = engine.model.logits

    def kept(*arguments: Any) -> torch.Tensor:
        found.append(advance(*arguments))
        return found[-1]

    graph, engine._graph = engine._graph, None  # a graph's steps cannot be listened to
    engine.model.logits = kept  # type: ignore[method-assign]
    try:
        list(engine.generate(encode_bytes(WORDS), steps))
    finally:
        engine._graph = graph
        del engine.model.logits  # type: ignore[attr-defined]
    return torch.stack(found).cpu()


def test_all_memory_of_the_engine_is_in_pools(engine: TextEngine) -> None:
    assert engine.outside() == []
    assert all(cumem.tag_of(part) == CACHE for part in engine._cache)
    cumem.sleep()
    tags = {tag.tag: tag for tag in cumem.stats().tags}
    assert tags[WEIGHTS].mapped_bytes == tags[CACHE].mapped_bytes == 0
    cumem.wake_up()


def test_a_text_is_the_same_after_a_sleep(engine: TextEngine) -> None:
    before = logits(engine)
    text = list(engine.generate(encode_bytes(WORDS), 8))
    assert len(before) == 4
    assert not torch.equal(before[0], before[1])
    cumem.sleep()
    cumem.wake_up(fill="poison")  # a cache that is not cleared would make every number a NaN
    assert torch.equal(logits(engine), before)
    assert list(engine.generate(encode_bytes(WORDS), 8)) == text


def test_the_static_cache_gives_what_a_growing_one_gives(engine: TextEngine) -> None:
    module = engine.module
    assert isinstance(module, StaticLlama)
    assert isinstance(module.llama, Llama)
    tokens = torch.tensor([encode_bytes(WORDS)], device=cumem.default_device())
    cache = [torch.zeros_like(part) for part in engine._cache]
    with torch.inference_mode():
        expected = [module.llama(tokens, cache, 0)[0]]
        for step in range(3):
            token = expected[-1].argmax().view(1, 1)
            expected.append(module.llama(token, cache, tokens.shape[1] + step)[0])
    torch.testing.assert_close(
        logits(engine).float(), torch.stack(expected).float().cpu(), rtol=0.02, atol=0.02
    )


def test_a_text_ends_where_the_cache_does(engine: TextEngine) -> None:
    assert len(list(engine.generate([1] * 60, 100))) == 4
    assert len(list(engine.generate([1], 3))) == 3
    for prompt in ([], [1] * 64):
        with pytest.raises(ValueError, match="it must have 1 to 63"):
            list(engine.generate(prompt, 1))


def test_a_text_ends_with_a_stop_token(engine: TextEngine) -> None:
    first = next(engine.generate([1, 2], 1))
    engine.model.stop_tokens = frozenset({first})
    assert list(engine.generate([1, 2], 5)) == []


# What a capture would refuse: a value that the host reads, or data that comes from it.
FROM_HOST = {"aten.item.default", "aten._local_scalar_dense.default", "aten.is_nonzero.default"}
FROM_HOST |= {"aten.nonzero.default", "aten.lift_fresh.default"}


class Calls(TorchDispatchMode):
    """The names of the operators that were called."""

    def __init__(self) -> None:
        super().__init__()
        self.names: set[str] = set()

    def __torch_dispatch__(
        self, call: Any, types: Any, given: tuple[Any, ...] = (), named: Any = None
    ) -> Any:
        self.names.add(str(call))
        return call(*given, **(named or {}))


def step_can_be_captured(engine: TextEngine) -> bool:
    engine.begin(encode_bytes(WORDS))
    with Calls() as calls:
        engine._advance()
    assert "aten.index_copy_.default" in calls.names  # the cache: so all of it was seen
    return not calls.names & FROM_HOST


def test_a_step_asks_nothing_of_the_host(engine: TextEngine) -> None:
    assert step_can_be_captured(engine)
    logits = engine.model.logits

    def asking(*given: Any) -> torch.Tensor:
        return logits(*given) + int(given[-1][0])

    engine.model.logits = asking  # type: ignore[method-assign]
    assert not step_can_be_captured(engine)
    del engine.model.logits  # type: ignore[attr-defined]


def test_bytes_are_text_where_they_can_be() -> None:
    assert encode_bytes("é") == [0xC3, 0xA9]
    assert decode_bytes([0xC3, 0xA9, 300, 65]) == "é<300>A"


def test_a_captured_step_gives_what_the_step_itself_gives(engine: TextEngine) -> None:
    if engine._graph is None:
        pytest.skip("the emulated driver has no graphs to replay")
    assert cumem.stats().mapped_bytes > 0
    assert GRAPH in {tag.tag for tag in cumem.stats().tags if tag.segments}
    captured = list(engine.generate(encode_bytes(WORDS), 16))
    graph, engine._graph = engine._graph, None
    assert list(engine.generate(encode_bytes(WORDS), 16)) == captured
    engine._graph = graph
    cumem.sleep()
    cumem.wake_up(fill="poison")
    assert list(engine.generate(encode_bytes(WORDS), 16)) == captured


def test_no_graph_is_made_where_none_is_wanted(
    driver: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    captured: list[bool] = []
    monkeypatch.setattr("cumem.serving.engine._can_capture", lambda *_: True)
    monkeypatch.setattr(TextEngine, "_capture", lambda _self: captured.append(True))
    TextEngine(OwnText(SMALL), 64, graph=False)
    assert not captured
    TextEngine(OwnText(SMALL), 64)
    assert captured


# A Hugging Face folder


def hugging_face_llama(**sizes: Any) -> Any:
    transformers = pytest.importorskip("transformers", reason="needs transformers, of demo")
    torch.manual_seed(0)
    kind = "Mistral" if "sliding_window" in sizes else "Llama"
    config = getattr(transformers, f"{kind}Config")(
        vocab_size=300,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        eos_token_id=299,
        **sizes,
    )
    return getattr(transformers, f"{kind}ForCausalLM")(config).eval()


DYNAMIC = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10_000.0}
KINDS = {"whole": {}, "sliding": {"sliding_window": 16}, "dynamic": {"rope_parameters": DYNAMIC}}


@pytest.mark.parametrize("sizes", KINDS.values(), ids=KINDS)
def test_a_hugging_face_model_makes_the_same_text_after_a_sleep(
    sizes: dict[str, Any], tmp_path: Path
) -> None:
    """Also one whose attention slides, over fewer tokens than prompt and text have."""
    model = hugging_face_llama(**sizes)
    from cumem.serving.folder_text import FolderText

    model.save_pretrained(tmp_path)
    prompt = encode_bytes(WORDS[:9])
    expected = model.generate(
        torch.tensor([prompt]), max_new_tokens=30, do_sample=False, eos_token_id=None
    )[0, len(prompt) :].tolist()
    engine = TextEngine(FolderText(tmp_path), 64)
    assert engine.outside() == []
    assert all(cumem.tag_of(part) == CACHE for part in engine._cache)
    engine.model.stop_tokens = frozenset()
    for _ in range(2):
        assert list(engine.generate(prompt, 30)) == expected
        cumem.sleep()
        cumem.wake_up(fill="poison")
    assert len(set(expected)) > 1
    assert step_can_be_captured(engine) is not engine.model.asks_the_host
    assert engine.model.asks_the_host is ("rope_parameters" in sizes)


def test_a_model_that_keeps_more_than_keys_and_values_is_refused(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers", reason="needs transformers, of demo")
    from cumem.serving.folder_text import FolderText

    config = transformers.Lfm2Config(
        vocab_size=300,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        layer_types=["conv", "full_attention"],
    )
    transformers.Lfm2ForCausalLM(config).save_pretrained(tmp_path)
    with pytest.raises(DemoError, match="needs a LinearAttentionLayer"):
        TextEngine(FolderText(tmp_path), 64)


def test_a_text_ends_with_what_the_folder_says_of_generation(tmp_path: Path) -> None:
    from cumem.serving.folder_text import _told_stops

    assert _told_stops(tmp_path) == []
    file = tmp_path / "generation_config.json"
    for text, stops in (
        ("{}", []),
        ('{"eos_token_id": 7}', [7]),
        ('{"eos_token_id": [7, 9]}', [7, 9]),
    ):
        file.write_text(text)
        assert _told_stops(tmp_path) == stops
    for text in ("[]", "{"):
        file.write_text(text)
        with pytest.raises(DemoError, match=r"generation_config\.json is not a JSON object"):
            _told_stops(tmp_path)


def test_a_cache_that_counts_on_the_host_is_refused_by_name() -> None:
    from cumem.serving.folder_text import _require_counts

    counted = SimpleNamespace(cumulative_length=torch.zeros(1))
    _require_counts([counted], "5.4.0")
    for older in (SimpleNamespace(), SimpleNamespace(cumulative_length=0)):
        with pytest.raises(DemoError, match=r"transformers 4\.57.*needs 5\.4 or newer"):
            _require_counts([counted, older], "4.57")
