"""What becomes of texts that have not begun, when the engine sleeps or many wait?"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator

import pytest
from serving_support import until
from serving_text_support import Server, over_http, text_engine

from cumem.serving import SleepController, State
from cumem.serving.engine import TextEngine
from cumem.serving.generating import Generate
from cumem.serving.metrics import Metrics


@pytest.fixture
def engine(driver: object) -> Iterator[TextEngine]:
    with text_engine() as made:
        yield made


@pytest.fixture
def go_on(engine: TextEngine, monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """A text stops after its first token, until this is set."""
    event, step = threading.Event(), engine.step

    def held() -> int:
        assert event.wait(20)
        return step()

    monkeypatch.setattr(engine, "step", held)
    return event


def test_a_sleep_waits_for_the_text_under_way_and_for_none_that_has_not_begun(
    engine: TextEngine, go_on: threading.Event
) -> None:
    async def test(server: Server) -> None:
        controller, metrics = server.controller, Metrics(server.controller)
        texts = [asyncio.create_task(server.generate(max_tokens=3)) for _ in range(4)]
        await until(lambda: controller.waiting == 3)
        assert b"cumem_requests_in_flight 1.0" in metrics.text()
        assert b"cumem_requests_waiting 3.0" in metrics.text()
        sleep = asyncio.create_task(controller.sleep())
        await until(lambda: controller.state is State.DRAINING)
        go_on.set()
        assert (await sleep).tags
        first, *others = await asyncio.gather(*texts)
        assert (first.status_code, len(others)) == (200, 3)
        for answer in others:
            assert (answer.status_code, answer.headers["retry-after"]) == (503, "1")
            assert answer.json()["state"] == "asleep"

    over_http(engine, test)


def test_texts_that_have_not_begun_wake_the_engine_where_a_request_may(
    engine: TextEngine, go_on: threading.Event
) -> None:
    async def test(server: Server) -> None:
        controller = server.controller
        texts = [asyncio.create_task(server.generate(max_tokens=3)) for _ in range(3)]
        await until(lambda: controller.waiting == 2)
        sleep = asyncio.create_task(controller.sleep())
        await until(lambda: controller.state is State.DRAINING)
        go_on.set()
        assert (await sleep).tags
        answers = await asyncio.gather(*texts)
        assert [answer.status_code for answer in answers] == [200] * 3
        assert len({answer.json()["text"] for answer in answers}) == 1
        assert [item.kind.value for item in controller.history] == ["sleep", "wake_up"]

    over_http(engine, test, auto_wake=True)


def test_a_text_too_many_is_503_with_retry_after(
    engine: TextEngine, go_on: threading.Event
) -> None:
    async def test(server: Server) -> None:
        texts = [asyncio.create_task(server.generate(max_tokens=3)) for _ in range(3)]
        await until(lambda: server.controller.waiting == 2)
        answer = await server.generate(stream=True)
        assert (answer.status_code, answer.headers["retry-after"]) == (503, "1")
        assert "2 wait already" in answer.json()["error"]
        go_on.set()
        assert {text.status_code for text in await asyncio.gather(*texts)} == {200}

    over_http(engine, test, most_waiting=2)


def test_texts_need_a_controller_that_lets_one_run(engine: TextEngine) -> None:
    with pytest.raises(ValueError, match="give the controller most_in_flight=1"):
        Generate(SleepController(modules=[engine.module]), engine)
