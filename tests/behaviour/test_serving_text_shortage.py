"""What becomes of a text that finds no memory on the device?"""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator

import pytest
import torch
from serving_text_support import Server, lines, over_http, text_engine

from cumem.serving.engine import TextEngine


@pytest.fixture
def engine(driver: object) -> Iterator[TextEngine]:
    with text_engine() as made:
        yield made


@pytest.fixture
def no_collector() -> Iterator[None]:
    gc.disable()
    yield
    gc.enable()


@pytest.mark.usefixtures("no_collector")
@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("where", ["begin", "step"])
def test_a_text_without_device_memory_is_507_and_the_server_goes_on(
    engine: TextEngine, stream: bool, where: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    held: list[weakref.ref[torch.Tensor]] = []

    def short(*_arguments: object) -> int:
        activations = torch.zeros(8)
        held.append(weakref.ref(activations))
        raise torch.OutOfMemoryError("no room for activations")

    async def test(server: Server) -> None:
        before = (await server.generate(max_tokens=4)).json()
        with monkeypatch.context() as patch:
            patch.setattr(engine, where, short)
            answer = await server.generate(max_tokens=4, stream=stream)
            assert held[0]() is None
        begun = stream and where == "step"
        assert answer.status_code == (200 if begun else 507)
        told = lines(answer)[-1]
        assert (told["error"], told["kind"]) == ("no room for activations", "OutOfMemoryError")
        assert told.get("done", False) is False
        assert (await server.generate(max_tokens=4)).json() == before

    over_http(engine, test)
