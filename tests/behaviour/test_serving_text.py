"""Is a text the same after a sleep, and does the server say what happened to it?"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Coroutine, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from serving_support import SECONDS, until

import cumem
from cumem._demo_llama import Llama
from cumem.serving import ServingOptions, SleepController, State
from cumem.serving.engine import CACHE, WEIGHTS, TextEngine
from cumem.serving.own_text import OwnText, StaticLlama
from cumem.serving.texts import decode_bytes, encode_bytes

httpx = pytest.importorskip("httpx", reason="needs httpx, of the test extra")
pytest.importorskip("starlette", reason="needs Starlette, of the serve extra")

from starlette.applications import Starlette  # noqa: E402 - where it is installed
from starlette.routing import Route  # noqa: E402

from cumem.serving.generating import Generate  # noqa: E402

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


def test_bytes_are_text_where_they_can_be() -> None:
    assert encode_bytes("é") == [0xC3, 0xA9]
    assert decode_bytes([0xC3, 0xA9, 300, 65]) == "é<300>A"


# Over HTTP


class Server:
    def __init__(self, engine: TextEngine, **options: Any) -> None:
        self.engine = engine
        self.controller = SleepController(
            modules=[engine.module], options=ServingOptions(**options)
        )
        app = Starlette(
            routes=[Route("/generate", Generate(self.controller, engine), methods=["POST"])]
        )
        self._client = httpx.AsyncClient(
            transport=httpx.ASGITransport(app), base_url="http://test", timeout=SECONDS
        )

    async def generate(self, **body: Any) -> Any:
        return await self._client.post("/generate", json={"prompt": WORDS, **body})


def over_http(
    engine: TextEngine, test: Callable[[Server], Coroutine[Any, Any, None]], **options: Any
) -> None:
    async def whole() -> None:
        server = Server(engine, **options)
        async with server.controller:
            await test(server)

    asyncio.run(asyncio.wait_for(whole(), SECONDS))


def lines(answer: Any) -> list[dict[str, Any]]:
    return [json.loads(line) for line in answer.text.splitlines()]


def test_a_client_gets_a_text_whole_or_in_pieces(engine: TextEngine) -> None:
    expected = engine.model.decode(list(engine.generate(encode_bytes(WORDS), 6)))

    async def test(server: Server) -> None:
        whole = await server.generate(max_tokens=6)
        assert (whole.status_code, whole.json()) == (200, {"text": expected})
        stream = await server.generate(max_tokens=6, stream=True)
        assert stream.headers["content-type"] == "application/x-ndjson"
        *pieces, last = lines(stream)
        assert "".join(piece["text"] for piece in pieces) == expected
        assert (len(pieces), last) == (6, {"done": True})

    over_http(engine, test)


def test_a_sleeping_engine_is_503_with_retry_after(engine: TextEngine) -> None:
    async def test(server: Server) -> None:
        await server.controller.sleep()
        for stream in (False, True):
            answer = await server.generate(stream=stream)
            assert (answer.status_code, answer.headers["retry-after"]) == (503, "1")
            assert answer.json()["kind"] == "NotServingError"

    over_http(engine, test)


def test_a_request_wakes_a_sleeping_engine(engine: TextEngine) -> None:
    async def test(server: Server) -> None:
        before = (await server.generate(max_tokens=4)).json()
        await server.controller.sleep()
        answers = await asyncio.gather(*(server.generate(max_tokens=4) for _ in range(3)))
        assert [answer.json() for answer in answers] == [before] * 3

    over_http(engine, test, auto_wake=True)


@pytest.mark.parametrize("stream", [True, False])
def test_an_aborted_text_says_so(engine: TextEngine, stream: bool) -> None:
    step = engine.step

    async def test(server: Server) -> None:
        loop, reached = asyncio.get_running_loop(), asyncio.Event()

        def slow() -> int:
            loop.call_soon_threadsafe(reached.set)
            until_asked.result(20)
            return step()

        asked = asyncio.Event()
        until_asked = asyncio.run_coroutine_threadsafe(asked.wait(), loop)
        engine.step = slow  # type: ignore[method-assign]
        answer = asyncio.create_task(server.generate(max_tokens=30, stream=stream))
        await reached.wait()
        sleep = asyncio.create_task(server.controller.sleep(mode="abort"))
        await until(lambda: server.controller.state is State.DRAINING)
        asked.set()
        assert (await sleep).tags
        found = await answer
        if stream:
            *pieces, last = lines(found)
            assert (len(pieces), last["done"], last["kind"]) == (1, False, "RequestAbortedError")
        else:
            assert (found.status_code, found.json()["kind"]) == (503, "RequestAbortedError")

    try:
        over_http(engine, test)
    finally:
        del engine.step  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ({"prompt": ""}, "prompt must be a text"),
        ({"prompt": 3}, "prompt must be a text"),
        ({"prompt": "x" * 64}, "the prompt has 64 tokens"),
        ({"max_tokens": 0}, "max_tokens must be a whole number, 1 or more"),
        ({"max_tokens": True}, "max_tokens must be a whole number"),
        ({"stream": "yes"}, "stream must be true or false"),
        ({"temperature": 1}, "unknown name 'temperature'; choices: "),
    ],
)
def test_what_cannot_be_made_is_400(engine: TextEngine, body: Any, message: str) -> None:
    async def test(server: Server) -> None:
        answer = await server.generate(**body)
        assert answer.status_code == 400
        assert message in answer.json()["error"]

    over_http(engine, test)


# A Hugging Face folder


def test_a_hugging_face_model_makes_the_same_text_after_a_sleep(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers", reason="needs transformers, of demo")
    from cumem.serving.folder_text import FolderText

    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=300,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        eos_token_id=299,
    )
    model = transformers.LlamaForCausalLM(config).eval()
    model.save_pretrained(tmp_path)
    prompt = encode_bytes(WORDS)
    expected = model.generate(
        torch.tensor([prompt]), max_new_tokens=8, do_sample=False, eos_token_id=None
    )[0, len(prompt) :].tolist()
    engine = TextEngine(FolderText(tmp_path), 64)
    assert engine.outside() == []
    assert all(cumem.tag_of(part) == CACHE for part in engine._cache)
    engine.model.stop_tokens = frozenset()
    for _ in range(2):
        assert list(engine.generate(prompt, 8)) == expected
        cumem.sleep()
        cumem.wake_up(fill="poison")
    assert len(set(expected)) > 1
