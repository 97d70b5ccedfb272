"""Does the benchmark of the text server measure what it says, and end what it starts?"""

from __future__ import annotations

import importlib
import json
import sys
import time
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch

from cumem.testing import emulated_driver

pytest.importorskip("uvicorn", reason="needs uvicorn, of the serve extra")
pytest.importorskip("starlette", reason="needs Starlette, of the serve extra")

sys.path.append(str(Path(__file__).parent.parent / "benchmarks"))  # scripts import by name

bench = importlib.import_module("bench_serve")
served = importlib.import_module("served_model")
process = importlib.import_module("server_process")


def run(*words: str) -> int:
    with emulated_driver():
        return int(bench.main(["--own", "--rest", "0", *words]))


def test_a_real_server_gives_every_row(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("CUMEM_DRIVER", "emulated")
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    file = tmp_path / "serve.json"
    words = ("--starts", "1", "--cycles", "1", "--tokens", "8", "--context", "256")
    assert run(*words, "--json", str(file)) == 0
    record = json.loads(file.read_text())
    rows = {row["name"]: row for row in record["rows"]}
    assert list(rows) == [name for name in (*bench.SECONDS, *bench.RATES) if name != bench.START]
    assert all(row["min"] > 0 for row in rows.values())
    assert record["cuda_graph"] is False
    assert {"weights", "kv_cache"} <= set(record["pool_bytes"])
    assert [slept["row"] for slept in record["sleeps"]] == [bench.FIRST_SLEEP, *[bench.SLEEP] * 2]
    assert all(slept["discarded_bytes"] > 0 for slept in record["sleeps"])
    out = capsys.readouterr().out
    assert all(name in out for name in rows)
    assert "EMULATED DRIVER" in out
    assert "no graph" in out


class FakeServer:
    """Answers at once, and remembers what it was asked for."""

    made: ClassVar[list[FakeServer]] = []
    forgets = False  # does a wake change the text?

    def __init__(self, *words: str) -> None:
        self.words, self.calls, self.ended = words, list[str](), False
        self.started = time.perf_counter()
        FakeServer.made.append(self)

    def __enter__(self) -> FakeServer:
        return self

    def __exit__(self, *error: object) -> None:
        self.ended = True

    def generate(self, prompt: str, tokens: int) -> Any:
        self.calls.append("generate")
        text = "other" if self.forgets and "wake_up" in self.calls else "text"
        return process.Text(text, self.started + 2.0, 0.5, 0.25)

    def post(self, path: str) -> tuple[float, dict[str, Any]]:
        self.calls.append(path.strip("/"))
        report = dict.fromkeys((*bench._TOLD, "seconds"), 1)
        tags = {"tags": ["kv_cache", "weights"], "undefined": ["kv_cache"]}
        return 0.125, {"is_sleeping": path == "/sleep", "report": {**report, **tags}}

    captures_always = False

    def pools(self) -> dict[str, int]:
        captured = self.captures_always or "--no-graph" not in self.words
        return {"cuda_graph": 1 << 21} if captured else {}


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> type[FakeServer]:
    monkeypatch.setattr(bench, "Server", FakeServer)
    monkeypatch.setattr(FakeServer, "made", [])
    return FakeServer


def test_what_is_first_in_a_process_is_measured_in_each(
    fake: type[FakeServer], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "serve.json"
    assert run("--starts", "3", "--cycles", "4", "--tokens", "51", "--json", str(file)) == 0
    record = json.loads(file.read_text())
    rows = {row["name"]: (row["count"], row["median"]) for row in record["rows"]}
    assert rows == {
        bench.FIRST_START: (1, pytest.approx(2.0)),
        bench.START: (2, pytest.approx(2.0)),
        bench.AWAKE: (4, 0.5),
        bench.WOKEN: (4, 0.5),
        bench.ASLEEP: (4, 0.5),
        bench.FIRST_SLEEP: (3, 0.125),
        bench.FIRST_WAKE: (3, 0.125),
        bench.SLEEP: (8, 0.125),
        bench.WAKE: (4, 0.125),
        bench.RATE_AWAKE: (4, 200.0),
        bench.RATE_WOKEN: (4, 200.0),
        bench.RATE_CALLED: (4, 200.0),
    }
    assert record["cuda_graph"] is True
    assert "replays a CUDA graph, whose pool has 2.0 MiB" in capsys.readouterr().out
    assert all(server.ended for server in fake.made)
    assert all("--auto-wake" in server.words for server in fake.made)
    # Asleep it is asked for a text without a wake before it.
    *captured, called = fake.made
    assert captured[-1].calls[-2:] == ["sleep", "generate"]
    assert captured[0].calls == ["generate"] * 3 + ["sleep", "wake_up", "generate"]
    assert [server for server in fake.made if "--no-graph" in server.words] == [called]
    assert called.calls == ["generate"] * 7


def test_a_server_that_captures_all_the_same_is_an_error(
    fake: type[FakeServer], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(FakeServer, "captures_always", True)
    with pytest.raises(SystemExit, match="has captured a graph"):
        run("--starts", "1", "--cycles", "1")
    assert [server.ended for server in fake.made] == [True, True]


def test_another_text_after_a_sleep_is_an_error(
    fake: type[FakeServer], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(FakeServer, "forgets", True)
    with pytest.raises(SystemExit, match="the text was 'text' and is now 'other'"):
        run()
    assert [server.ended for server in fake.made] == [True]


def test_a_text_that_ends_otherwise_is_told_and_no_error() -> None:
    assert bench.share_in_common("abcx", "abcd") == 0.75
    assert bench.share_in_common("abcd", "abcd") == 1.0
    assert bench.share_in_common("x", "abcd") < bench._SURE


def test_a_text_that_does_not_fit_is_refused_before_anything_is_started(
    fake: type[FakeServer], capsys: pytest.CaptureFixture[str]
) -> None:
    for words in (("--tokens", "1"), ("--tokens", "100", "--context", "200")):
        with pytest.raises(SystemExit) as refused:
            run(*words)
        assert refused.value.code == 2
        assert "must fit --context" in capsys.readouterr().err
    assert not fake.made


@pytest.mark.parametrize(
    ("code", "message"),
    [
        ("raise SystemExit(3)", "the server did not start: status 3"),
        (
            "import signal, time\n"
            "signal.signal(signal.SIGINT, lambda *_: exit(4))\n"
            "print('listening on http://127.0.0.1:1/; Ctrl-C ends it', flush=True)\n"
            "time.sleep(60)",
            "the server ended with status 4 after an interrupt",
        ),
    ],
)
def test_a_server_that_does_not_start_or_end_well_is_an_error(
    code: str, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    popen = process.subprocess.Popen

    def other(_command: list[str], **options: Any) -> Any:
        return popen([sys.executable, "-c", code], **options)

    monkeypatch.setattr(process.subprocess, "Popen", other)
    with pytest.raises(SystemExit, match=message), process.Server():
        pass


def test_the_model_is_as_large_as_asked_for() -> None:
    for gib in (2.5, 4, 16):
        shape = served.shape_for(int(gib * (1 << 30)))
        assert shape.hidden == 3072
        assert 0.9 * gib < shape.bytes / (1 << 30) <= gib
    assert served.shape_for(0).layers == 2


def test_the_server_can_read_the_folder_and_its_texts_vary(tmp_path: Path) -> None:
    pytest.importorskip("transformers", reason="needs transformers, of demo")
    from cumem.serving.engine import TextEngine
    from cumem.serving.folder_text import FolderText

    torch.set_num_threads(1)
    shape = served.shape_for(1 << 20)
    with emulated_driver(), served.model_folder(shape, torch.device("cpu"), tmp_path) as folder:
        engine = TextEngine(FolderText(folder), 256)
        assert engine.loaded.bytes == shape.bytes
        assert not engine.loaded.missing
        tokens = list(engine.generate(engine.model.encode(bench.PROMPT), 32))
        del engine
    assert len(tokens) == 32
    assert len(set(tokens)) > 8
    assert not list(tmp_path.iterdir())
