"""How soon does a text server answer, awake, asleep or started anew, and how fast is its text?

    python benchmarks/bench_serve.py --gib 4 --json serve.json

README.md beside this file says what each number means.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict
from itertools import takewhile
from pathlib import Path
from typing import Any

import torch
from machine import describe
from outside import Outside
from processes import command_of, say, write_json
from served_model import model_folder, shape_for
from server_process import Server, Text
from settings import GIB, add_json, count, size
from tables import EMULATED, milliseconds, text_table

import cumem
from cumem._demo_llama import Shape
from cumem._text import amount

PROMPT = "The weights went to sleep, and woke up at the same address with the same bytes. " * 2
_CACHE, _GRAPH = "kv_cache", "cuda_graph"
_WARM_TEXTS = 2
# Of a text that must be as it was. Weights that are not what they were change the first token;
# later ones change on a GPU also when nothing sleeps: see README.md.
_SURE = 1 / 16
_TOLD = ("freed_bytes", "offloaded_bytes", "discarded_bytes", "copied_bytes", "host_bytes")
_SEEN = _FREED, _HELD = "freed_bytes_seen_outside", "held_bytes_seen_outside"

FIRST_START = "process start to first token: first start"
START = "process start to first token: again"
AWAKE, WOKEN, ASLEEP = "first token: awake", "first token: after a wake", "first token: asleep"
FIRST_SLEEP, FIRST_WAKE = "sleep: first of its process", "wake:  first of its process"
SLEEP, WAKE = "sleep: later, weights unchanged", "wake:  later"
RATE_AWAKE, RATE_WOKEN = "tokens/s: awake", "tokens/s: after a wake"
SECONDS = (FIRST_START, START, AWAKE, WOKEN, ASLEEP, FIRST_SLEEP, FIRST_WAKE, SLEEP, WAKE)
RATE_CALLED = "tokens/s: awake, no captured step"
RATES = (RATE_AWAKE, RATE_WOKEN, RATE_CALLED)


def share_in_common(text: str, expected: str) -> float:
    """How much of ``expected`` ``text`` begins with."""
    pairs = zip(text, expected, strict=False)
    same = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))
    return same / max(1, len(expected))


class Bench:
    """Servers one after the other, and what was measured at each."""

    def __init__(self, asked: argparse.Namespace, words: Sequence[str], outside: Outside) -> None:
        self._asked, self._words, self._outside = asked, words, outside
        self._free_at_first = outside.free_bytes()
        self.samples: dict[str, list[float]] = {name: [] for name in (*SECONDS, *RATES)}
        self.sleeps: list[dict[str, Any]] = []
        self.facts: dict[str, Any] = {}
        self.least_same = 1.0

    def run(self) -> None:
        """Each server gives a sample of the rows that are first in a process."""
        starts = self._asked.starts
        for turn in range(starts):
            say(f"server {turn + 1} of {starts}")
            with Server(*self._words) as server:
                expected = self._first(server, FIRST_START if turn == 0 else START)
                if turn == starts - 1:
                    self._later(server, expected)
        say("a server without a captured step")
        self._called([*self._words, "--no-graph"])

    def _first(self, server: Server, row: str) -> str:
        """Its first answer, sleep and wake; returns the text."""
        answer = server.generate(PROMPT, self._asked.tokens)
        self._book(row, answer.first - server.started)
        self._note(server)
        for _ in range(_WARM_TEXTS):
            self._text(server, answer.text)
        self._sleep(server, FIRST_SLEEP)
        self._book(FIRST_WAKE, self._wake(server))
        self._text(server, answer.text)
        return answer.text

    def _later(self, server: Server, expected: str) -> None:
        """What a server does again and again, each way on its own."""
        for _ in range(self._asked.cycles):
            answer = self._text(server, expected)
            self._book(AWAKE, answer.first_seconds)
            self._book(RATE_AWAKE, self._rate(answer))
        for _ in range(self._asked.cycles):
            self._sleep(server, SLEEP)
            self._book(WAKE, self._wake(server))
            answer = self._text(server, expected)
            self._book(WOKEN, answer.first_seconds)
            self._book(RATE_WOKEN, self._rate(answer))
        for _ in range(self._asked.cycles):
            self._sleep(server, SLEEP)
            self._book(ASLEEP, self._text(server, expected).first_seconds)

    def _called(self, words: Sequence[str]) -> None:
        """The rate of a server that calls its decode step."""
        with Server(*words) as server:
            if server.pools().get(_GRAPH):
                raise SystemExit("a server that was started with --no-graph has captured a graph")
            expected = server.generate(PROMPT, self._asked.tokens).text
            for turn in range(_WARM_TEXTS + self._asked.cycles):
                answer = self._text(server, expected)
                if turn >= _WARM_TEXTS:
                    self._book(RATE_CALLED, self._rate(answer))

    def _text(self, server: Server, expected: str) -> Text:
        answer = server.generate(PROMPT, self._asked.tokens)
        self.least_same = min(self.least_same, share_in_common(answer.text, expected))
        if self.least_same < _SURE:
            raise SystemExit(f"the text was {expected!r} and is now {answer.text!r}")
        return answer

    def _rate(self, answer: Text) -> float:
        return float((self._asked.tokens - 1) / answer.rest_seconds)

    def _sleep(self, server: Server, row: str) -> None:
        """And a rest after it, so that the driver has scrubbed what was released."""
        free = self._outside.free_bytes()
        seconds, answer = server.post("/sleep")
        now = self._outside.free_bytes()
        report = answer["report"]
        if not answer["is_sleeping"] or _CACHE not in report["tags"]:
            raise SystemExit(f"it does not sleep: {answer}")
        self._book(row, seconds)
        self.sleeps.append(
            {
                "row": row,
                "seconds": report["seconds"],
                **{name: report[name] for name in _TOLD},
                _FREED: _difference(now, free),
                _HELD: _difference(self._free_at_first, now),
            }
        )
        time.sleep(self._asked.rest)

    def _wake(self, server: Server) -> float:
        seconds, answer = server.post("/wake_up")
        if answer["is_sleeping"] or _CACHE not in answer["report"]["undefined"]:
            raise SystemExit(f"it is not awake, or kept what it was to discard: {answer}")
        return seconds

    def _book(self, row: str, value: float) -> None:
        self.samples[row].append(value)

    def _note(self, server: Server) -> None:
        """What the server says of its pools; a captured decode step has one of its own."""
        pools = server.pools()
        self.facts = {"pool_bytes": pools, "cuda_graph": pools.get(_GRAPH, 0) > 0}


def _difference(more: int | None, less: int | None) -> int | None:
    return None if more is None or less is None else more - less


def summary(bench: Bench) -> list[dict[str, Any]]:
    """Count, median, least and most of each row that has samples, and the samples."""
    return [
        {
            "name": name,
            "unit": "tokens/s" if name in RATES else "s",
            "count": len(samples),
            "median": statistics.median(samples),
            "min": min(samples),
            "max": max(samples),
            "samples": samples,
        }
        for name, samples in bench.samples.items()
        if samples
    ]


def shown(rows: Sequence[dict[str, Any]], bench: Bench, blind: str) -> str:
    """The tables, and what was seen beside them."""
    times = [_line(row, milliseconds) for row in rows if row["unit"] == "s"]
    rates = [_line(row, lambda rate: f"{rate:.1f}") for row in rows if row["unit"] != "s"]
    ends = ("n", "median", "min", "max")
    graph = bench.facts["pool_bytes"].get(_GRAPH, 0)
    replayed = f"replays a CUDA graph, whose pool has {amount(graph)}"
    how = replayed if graph else "is called: no graph"
    lines = [
        text_table(("row, in ms", *ends), times),
        "",
        text_table(("row", *ends), rates),
        "",
        f"Decode: each step {how}.",
        _memory(bench.sleeps[0], blind),
        f"Every text begins as the first of its process did; {bench.least_same:.0%} or more of "
        "it is the same.",
    ]
    return "\n".join(lines)


def _line(row: dict[str, Any], text: Any) -> tuple[str, ...]:
    return (row["name"], str(row["count"]), *(text(row[key]) for key in ("median", "min", "max")))


def _memory(slept: dict[str, Any], blind: str) -> str:
    told = {name: amount(slept[name]) for name in (*_TOLD, *_SEEN)}
    seen = f"{told[_FREED]} seen from outside, where the server still holds {told[_HELD]}"
    if blind:
        seen = f"unseen from outside, because {blind}"
    return (
        f"First sleep: freed {told['freed_bytes']} ({seen}); copied {told['copied_bytes']}, "
        f"discarded {told['discarded_bytes']}, host memory {told['host_bytes']}."
    )


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the benchmark; returns the exit status."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    parser = _parser()
    asked = parser.parse_args(words)
    if asked.tokens < 2 or len(PROMPT) + asked.tokens > asked.context:
        parser.error(f"{len(PROMPT)} tokens of prompt and 2 or more must fit --context")
    device = cumem.default_device()
    bench, blind = measure(asked, device)
    rows = summary(bench)
    print(_heading(asked, bench, device), end="\n\n")
    print(shown(rows, bench, blind))
    record = {
        "benchmark": "serve",
        "command": command_of("bench_serve.py", words),
        "environment": describe(device),
        "model": "the server's own" if asked.own else asdict(_shape(asked)),
        "prompt_tokens": len(PROMPT),
        "tokens": asked.tokens,
        "context": asked.context,
        **bench.facts,
        "least_share_of_a_text_in_common": bench.least_same,
        "rows": rows,
        "sleeps": bench.sleeps,
    }
    write_json(asked.json, record)
    return 0


def measure(asked: argparse.Namespace, device: torch.device) -> tuple[Bench, str]:
    """All rows; and why nothing was seen from outside, empty where it was."""
    with ExitStack() as stack:
        words = ["--context", str(asked.context), "--auto-wake"]
        if not asked.own:
            shape = _shape(asked)
            say(f"writing {shape.layers} layers of width {shape.hidden}, {amount(shape.bytes)}")
            folder = stack.enter_context(model_folder(shape, device, asked.folder))
            words += ["--model", str(folder)]
        outside = stack.enter_context(Outside(emulated=device.type != "cuda"))
        bench = Bench(asked, words, outside)
        bench.run()
    return bench, outside.blind


def _shape(asked: argparse.Namespace) -> Shape:
    return shape_for(int(asked.gib * GIB))


def _heading(asked: argparse.Namespace, bench: Bench, device: torch.device) -> str:
    line = (
        f"Texts of {asked.tokens} tokens after a prompt of {len(PROMPT)}, one at a time; "
        f"{amount(bench.sleeps[0]['offloaded_bytes'])} come back at each wake"
    )
    return line if device.type == "cuda" else f"{line}\n{EMULATED}"


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description="Time until a text server answers.")
    parser.add_argument("--gib", type=size, default=4.0, help="size of the model")
    parser.add_argument("--own", action="store_true", help="the server's own small model instead")
    parser.add_argument("--tokens", type=count, default=128, help="of each text")
    parser.add_argument("--context", type=count, default=1024, help="tokens of the KV cache")
    parser.add_argument("--starts", type=count, default=3, help="servers, one after the other")
    parser.add_argument("--cycles", type=count, default=5, help="samples of each later row")
    parser.add_argument("--rest", type=size, default=0.3, metavar="SECONDS", help="asleep")
    parser.add_argument("--folder", type=Path, help="where the model is written meanwhile")
    add_json(parser)
    return parser


if __name__ == "__main__":
    sys.exit(main())
