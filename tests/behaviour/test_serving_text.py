"""Does a client get its text, or hear what happened to it?"""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
from serving_support import SECONDS, until
from serving_text_support import WORDS, Server, httpx, lines, over_http, text_engine

from cumem.serving import ServingOptions, State
from cumem.serving.engine import TextEngine
from cumem.serving.server import Listening, application
from cumem.serving.texts import encode_bytes


@pytest.fixture
def engine(driver: object) -> Iterator[TextEngine]:
    with text_engine() as made:
        yield made


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


def test_a_stream_decodes_a_few_tokens_for_each_of_its_own(
    engine: TextEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    decode, decoded = engine.model.decode, list[int]()

    def counted(tokens: Sequence[int]) -> str:
        decoded.append(len(tokens))
        return decode(tokens)

    async def test(server: Server) -> None:
        assert len(lines(await server.generate(max_tokens=38, stream=True))) > 1
        assert 38 <= sum(decoded) <= 38 * 8  # all anew for each: 38 * 19
        decoded.clear()
        assert (await server.generate(max_tokens=38)).status_code == 200
        assert decoded == [38]

    monkeypatch.setattr(engine.model, "decode", counted)
    over_http(engine, test)


def test_the_server_makes_every_token_in_one_thread(
    engine: TextEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a GPU each thread would take a cuBLAS workspace of its own, which never sleeps."""
    threads: list[int] = []
    generate = engine.generate

    def noted(tokens: Sequence[int], most: int) -> Iterator[int]:
        for token in generate(tokens, most):
            threads.append(threading.get_ident())
            yield token

    async def test() -> None:
        app = application(engine, ServingOptions(), Listening())
        async with (
            app.router.lifespan_context(app),
            httpx.AsyncClient(
                transport=httpx.ASGITransport(app), base_url="http://127.0.0.1", timeout=SECONDS
            ) as client,
        ):
            texts = (client.post("/generate", json={"prompt": WORDS}) for _ in range(8))
            assert {answer.status_code for answer in await asyncio.gather(*texts)} == {200}

    monkeypatch.setattr(engine, "generate", noted)
    asyncio.run(asyncio.wait_for(test(), SECONDS))
    assert len(threads) == 8 * 38
    assert len(set(threads)) == 1


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


def test_weights_that_a_sleep_discarded_are_loaded_before_a_text_is_made(
    engine: TextEngine,
) -> None:
    async def test(server: Server) -> None:
        server.controller.restore(engine.restore)
        before = (await server.generate(max_tokens=4)).json()
        assert "weights" in (await server.controller.sleep(level=2)).tags
        assert (await server.generate(max_tokens=4)).json() == before

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


@pytest.mark.parametrize("stream", [True, False])
def test_what_nobody_foresaw_is_told_and_logged(
    engine: TextEngine, stream: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken() -> int:
        raise ValueError("the model has a bug")

    async def test(server: Server) -> None:
        whole: list[bytes] = []

        async def send(message: Any) -> None:
            whole.append(message.get("body", b""))

        with pytest.raises(ValueError, match="has a bug"):  # for the server's log
            await server.ask({"prompt": WORDS, "stream": stream}, send)
        last = json.loads(b"".join(whole).splitlines()[-1])
        assert (last["error"], last["kind"]) == ("the model has a bug", "ValueError")
        assert server.controller.in_flight == 0

    monkeypatch.setattr(engine, "step", broken)
    over_http(engine, test)


def test_a_client_that_left_while_others_had_their_turn_costs_nothing(
    engine: TextEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    def begin(_tokens: Sequence[int]) -> int:
        raise AssertionError("a text was begun for nobody")

    async def test(server: Server) -> None:
        async def send(_message: Any) -> None:
            return

        await server.ask({"prompt": WORDS}, send, leaves=True)

    monkeypatch.setattr(engine, "begin", begin)
    over_http(engine, test)


def test_a_text_may_fill_the_cache_to_its_end(engine: TextEngine) -> None:
    expected = engine.model.decode(list(engine.generate(encode_bytes(WORDS), 38)))

    async def test(server: Server) -> None:
        assert (await server.generate(max_tokens=38)).json() == {"text": expected}
        assert (await server.generate()).json() == {"text": expected}  # as much as there is

    over_http(engine, test)


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ({"prompt": ""}, "prompt must be a text"),
        ({"prompt": 3}, "prompt must be a text"),
        ({"prompt": "x" * 64}, "the prompt has 64 tokens"),
        ({"max_tokens": 0}, "max_tokens must be a whole number, 1 or more"),
        ({"max_tokens": 39}, "after a prompt of 26 tokens the KV cache of 64 has room for 38"),
        ({"max_tokens": 1 << 60}, "has room for 38"),
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
