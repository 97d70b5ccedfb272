"""Does ``python -m cumem serve`` serve, keep others out, and end clean?"""

from __future__ import annotations

import asyncio
import json
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from serving_process import ServerProcess, httpx
from support import run_fresh

from cumem.__main__ import main
from cumem.serving.folder_text import _most_positions
from cumem.serving.local import OnlyFrom, is_loopback


@pytest.fixture(scope="module")
def server() -> Iterator[ServerProcess]:
    with ServerProcess() as process:
        yield process


@pytest.mark.parametrize("asleep", [False, True])
def test_ctrl_c_ends_it_clean_awake_or_asleep(asleep: bool) -> None:
    with ServerProcess() as server:
        if asleep:
            assert server.post("sleep").json()["is_sleeping"]
        assert server.interrupt() == (0, "ended\n", "")


def test_a_text_streams_over_a_real_connection(server: ServerProcess) -> None:
    whole = server.post("generate", json={"prompt": "Once", "max_tokens": 5}).json()["text"]
    body = {"prompt": "Once", "max_tokens": 5, "stream": True}
    with server.client.stream("POST", "generate", json=body) as answer:
        *pieces, last = [json.loads(line) for line in answer.iter_lines()]
    assert "".join(piece["text"] for piece in pieces) == whole
    assert last == {"done": True}


def test_it_sleeps_refuses_and_wakes(server: ServerProcess) -> None:
    before = server.post("generate", json={"prompt": "Once", "max_tokens": 3}).json()
    slept = server.post("sleep").json()
    assert slept["tags"] == ["kv_cache", "weights"]
    refused = server.post("generate", json={"prompt": "Once"})
    assert (refused.status_code, refused.headers["retry-after"]) == (503, "1")
    memory = server.get("memory").json()
    assert all(tag["mapped_bytes"] == 0 for tag in memory["tags"])
    assert server.post("wake_up").json()["is_sleeping"] is False
    assert server.post("generate", json={"prompt": "Once", "max_tokens": 3}).json() == before


def test_a_client_that_leaves_does_not_keep_the_engine_awake(server: ServerProcess) -> None:
    body = {"prompt": "Once", "max_tokens": 60, "stream": True}
    with server.client.stream("POST", "generate", json=body) as answer:
        next(answer.iter_lines())
    assert server.post("sleep?timeout=30").status_code == 200
    assert server.post("wake_up").status_code == 200


@pytest.mark.parametrize(
    "headers",
    [
        {"Host": "evil.example"},
        {"Host": "127.0.0.1.evil.example"},
        {"Host": "[::1"},
        {"Origin": "http://evil.example"},
        {"Origin": "null"},
        {"Origin": "https://127.0.0.1"},
    ],
)
def test_pages_of_other_sites_cannot_press_the_buttons(
    server: ServerProcess, headers: dict[str, str]
) -> None:
    answer = server.post("sleep", headers=headers)
    assert (answer.status_code, answer.json()["kind"]) == (403, "Forbidden")
    assert server.get("is_sleeping").json()["is_sleeping"] is False


def test_its_own_page_can(server: ServerProcess) -> None:
    origin = server.url.rstrip("/")
    for action in ("sleep", "wake_up"):
        assert server.post(action, headers={"Origin": origin}).status_code == 200
    page = server.get("")
    policy = page.headers["content-security-policy"]
    nonce = policy.partition("script-src 'nonce-")[2].partition("'")[0]
    assert len(nonce) > 16
    assert page.text.count(f'nonce="{nonce}"') == 2
    assert "{{nonce}}" not in page.text
    assert "frame-ancestors 'none'" in policy
    assert server.get("").headers["content-security-policy"] != policy


def test_nothing_listens_for_others_without_a_token(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUMEM_DRIVER", "emulated")
    for host in ("0.0.0.0", "::", "192.0.2.1", "example.org"):
        assert main(["serve", "--host", host, "--port", "0"]) == 1
        assert f"others can reach {host!r}" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("host", "loopback"),
    [
        ("localhost", True),
        ("127.0.0.1", True),
        ("127.8.9.1", True),
        ("::1", True),
        ("0.0.0.0", False),
        ("::", False),
        ("10.0.0.1", False),
        ("localhost.evil.example", False),
    ],
)
def test_loopback_is_what_only_this_machine_reaches(host: str, loopback: bool) -> None:
    assert is_loopback(host) is loopback


def test_with_a_token_it_listens_anywhere_for_those_who_have_it(tmp_path: Path) -> None:
    file = tmp_path / "token"
    file.write_text("secret\n")
    with ServerProcess("--host", "0.0.0.0", "--token-file", str(file)) as server:
        port = httpx.URL(server.url).port
        with httpx.Client(base_url=f"http://127.0.0.1:{port}/", timeout=60) as client:
            assert client.get("").status_code == 200  # the page has no secret
            for path in ("sleep", "wake_up", "generate"):
                assert client.post(path).status_code == 401
            for path in ("memory", "metrics", "is_sleeping", "transitions"):
                assert client.get(path).status_code == 401
            good = {"Authorization": "Bearer secret"}
            assert client.post("sleep", headers=good).status_code == 200
        assert server.interrupt() == (0, "ended\n", "")


def test_names_of_this_server_can_be_added() -> None:
    async def ok(_scope: Any, _receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b""})

    async def ask(host: str) -> int:
        transport = httpx.ASGITransport(OnlyFrom(ok, ["gpu-1", "::1"]))
        async with httpx.AsyncClient(transport=transport, base_url="http://x") as client:
            answer = await client.get("/", headers={"Host": host})
            return int(answer.status_code)

    async def answers() -> list[int]:
        return [await ask(host) for host in ("GPU-1:8000", "gpu-1", "[::1]:80", "gpu-2", "::1")]

    assert asyncio.run(answers()) == [200, 200, 200, 403, 403]


@pytest.mark.parametrize(("words", "graph"), [([], True), (["--no-graph"], False)])
def test_whether_a_graph_is_captured_can_be_said(
    words: list[str],
    graph: bool,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def engine(_model: object, _context: int, *, graph: bool) -> None:
        raise ValueError(f"made with graph={graph}")

    monkeypatch.setenv("CUMEM_DRIVER", "emulated")
    monkeypatch.setattr("cumem.serving.engine.TextEngine", engine)
    assert main(["serve", "--port", "0", *words]) == 1
    assert f"made with graph={graph}" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "made"), [([], 600), (["--context", "600"], 600), (["--context", "601"], None)]
)
def test_a_context_longer_than_the_model_is_refused_before_it_is_built(
    words: list[str],
    made: int | None,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def engine(_model: object, context: int, *, graph: bool) -> None:
        raise ValueError(f"built for {context}")

    monkeypatch.setenv("CUMEM_DRIVER", "emulated")
    monkeypatch.setattr("cumem.serving.engine.TextEngine", engine)
    monkeypatch.setattr("cumem.serving.own_text.OwnText.most_tokens", 600)
    assert main(["serve", "--port", "0", *words]) == 1
    expected = f"built for {made}" if made else "--context 601 is more than the 600 tokens"
    assert expected in capsys.readouterr().err


YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 1000}
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "original_max_position_embeddings": 1000}


@pytest.mark.parametrize(
    ("config", "most"),
    [
        ({}, None),
        ({"max_position_embeddings": -1}, None),
        ({"max_position_embeddings": 2048}, 2048),
        ({"max_seq_len": 512}, 512),
        ({"max_position_embeddings": 1000, "rope_scaling": YARN}, 4000),
        ({"max_position_embeddings": 4000, "rope_parameters": {"full": YARN}}, 4000),
        (
            {"max_position_embeddings": 9, "rope_parameters": {"rope_type": "llama3", "factor": 8}},
            9,
        ),
    ],
)
def test_a_model_says_how_long_its_texts_may_be(config: dict[str, Any], most: int | None) -> None:
    assert _most_positions(SimpleNamespace(**config)) == most


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--model", "nowhere"], "no folder 'nowhere'"),
        (["--context", "1"], "--context must be at least 2"),
        (["--most-waiting", "0"], "most_waiting must be at least 1"),
        (["--idle-seconds", "0"], "idle_seconds must be positive"),
        (["--token-file", "/dev/null"], "is empty"),
        (["--token-file", "/nonexistent"], "No such file"),
    ],
)
def test_what_cannot_be_served_is_one_line(
    words: list[str],
    message: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("CUMEM_DRIVER", "emulated")
    assert main(["serve", "--port", "0", *words]) == 1
    err = capsys.readouterr().err
    assert err.startswith("cumem serve: ")
    assert message in err
    assert err.count("\n") == 1


def test_a_port_in_use_is_said_before_a_model_is_loaded(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUMEM_DRIVER", "emulated")
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        assert main(["serve", "--port", str(port)]) == 1
    out, err = capsys.readouterr()
    start = f"cumem serve: cannot listen on port {port} of 127.0.0.1: the port is in use; "
    assert err.startswith(start)
    assert err.count("\n") == 1
    assert "model:" not in out


# What is not asked for is not imported


def test_the_library_and_the_controller_need_no_server() -> None:
    run_fresh(
        "import sys, cumem, cumem.serving\n"
        "cumem.serving.SleepController\n"
        "loaded = {'starlette', 'uvicorn', 'prometheus_client', 'anyio'} & set(sys.modules)\n"
        "assert not loaded, loaded\n"
        "cumem.serving.router\n"
        "assert 'starlette' in sys.modules\n"
    )


@pytest.mark.parametrize("missing", ["starlette", "prometheus_client"])
def test_a_missing_extra_is_named(missing: str) -> None:
    run_fresh(
        f"import sys; sys.modules['{missing}'] = None\n"
        "import cumem.serving\n"
        "try:\n"
        "    cumem.serving.router\n"
        "except ImportError as error:\n"
        "    assert 'pip install \"cumem[serve]\"' in str(error), error\n"
        "else:\n"
        "    raise SystemExit('no error')\n"
    )


def test_serve_without_the_extra_is_one_line() -> None:
    code = (
        "import sys; sys.modules['uvicorn'] = None\n"
        "from cumem.__main__ import main\n"
        "raise SystemExit(main(['serve']))\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 1
    assert 'pip install "cumem[serve]"' in done.stderr
    assert done.stderr.count("\n") == 1
