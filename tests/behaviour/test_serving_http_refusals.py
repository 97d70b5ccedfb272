"""What does the router refuse before anything is changed?"""

from __future__ import annotations

from typing import Any

import pytest
from serving_http import Client, over_http
from serving_support import Engine, run

import cumem


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("/sleep?tags=wieghts", "unknown tag 'wieghts'; known tags: "),
        ("/sleep?tag=weights", "unknown parameter 'tag'; choices: "),
        ("/sleep?level=7", "unknown level 7; choices: 0, 1, 2"),
        ("/sleep?level=one", "level must be a whole number, not 'one'"),
        ("/sleep?level=1&level=2", "level was given 2 times"),
        ("/sleep?mode=now", "unknown mode 'now'; choices: 'abort', 'wait'"),
        ("/sleep?timeout=soon", "timeout must be a number of seconds"),
        ("/sleep?timeout=-1", "timeout must be positive"),
        ("/sleep?level=2&offload_tags=weights", "level=2 discards everything"),
        ("/wake_up?tags=wieghts", "unknown tag 'wieghts'"),
        ("/wake_up?level=1", "unknown parameter 'level'"),
    ],
)
def test_what_cannot_be_understood_is_400_with_the_choices(path: str, message: str) -> None:
    async def test(client: Client) -> None:
        answer = await client.post(path)
        assert answer.status_code == 400
        assert message in answer.json()["error"]
        assert not cumem.is_sleeping()

    over_http(test)


@pytest.mark.parametrize("path", ["/sleep", "/wake_up"])
def test_a_body_where_the_query_is_read_is_refused(path: str) -> None:
    async def test(client: Client) -> None:
        answer = await client.post(path, content=b'{"tags": ["weights"]}')
        assert answer.status_code == 400
        assert "put parameters into the query" in answer.json()["error"]
        assert not cumem.is_sleeping()

    over_http(test)


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (b"{", "the body is not JSON"),
        (b"[]", "must be a JSON object"),
        (b'{"tags": ' + b"[" * 60_000, "the body is not JSON"),
        (b'{"tag": []}', "unknown name 'tag'; choices: 'tags'"),
        (b'{"tags": "weights"}', "tags must be a list of strings"),
        (b'{"tags": [1]}', "tags must be a list of strings"),
        (b" " * (65 << 10), "the body is larger than"),
    ],
)
def test_a_body_that_cannot_be_understood_is_400(body: bytes, message: str) -> None:
    async def test(client: Client) -> None:
        answer = await client.post("/release_memory_occupation", content=body)
        assert (answer.status_code, cumem.is_sleeping()) == (400, False)
        assert message in answer.json()["error"]

    over_http(test)


def test_a_token_is_needed_for_every_route_once_there_is_one() -> None:
    async def test(client: Client) -> None:
        for headers in (
            {},
            {"Authorization": "Bearer wrong"},
            {"Authorization": "secret"},
            {"Authorization": "Bearer secret2"},
            {"Authorization": "Bearer sécret".encode()},
        ):
            for path in ("/sleep", "/wake_up"):
                assert (await client.post(path, headers=headers)).status_code == 401
            for path in ("/is_sleeping", "/memory", "/metrics", "/transitions"):
                answer = await client.get(path, headers=headers)
                assert answer.status_code == 401
                assert answer.headers["www-authenticate"] == "Bearer"
        assert not cumem.is_sleeping()
        good = {"Authorization": "Bearer secret"}
        assert (await client.post("/sleep", headers=good)).status_code == 200

    over_http(test, token="secret")


@pytest.mark.parametrize(("token", "error"), [("", ValueError), (" ", ValueError), (1, TypeError)])
def test_a_token_that_protects_nothing_is_refused(token: Any, error: type[Exception]) -> None:
    async def test(engine: Engine) -> None:
        with pytest.raises(error):
            cumem.serving.router(engine.controller, token=token)
        with pytest.raises(TypeError, match="controller must be a SleepController, not a Engine"):
            cumem.serving.router(engine, token="secret")

    run(test)
