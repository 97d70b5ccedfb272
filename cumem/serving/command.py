"""What does ``python -m cumem serve`` take, and what does it say?"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import Any

from cumem import _runtime
from cumem._demo_folder import find_folder
from cumem._demo_subject import DemoError
from cumem._text import size
from cumem.serving.states import ServingOptions
from cumem.serving.texts import TextModel

Say = Callable[[str], None]

_MIB = 1 << 20
_CONTEXT = 1024  # tokens
_MOST_WAITING = 64  # few enough for the last to be served while its client still listens
_OWN_BYTES = {True: 4 * _MIB, False: 256 * _MIB}  # weights of the own model: emulated, on a GPU


def _port(text: str) -> int:
    port = int(text) if text.isdecimal() else -1
    if not 0 <= port <= 65535:
        raise argparse.ArgumentTypeError(f"not a port: {text!r}; give one from 0 to 65535")
    return port


def add_parser(commands: Any) -> None:
    """Adds ``serve`` to the commands."""
    parser = commands.add_parser(
        "serve",
        help="serve a text model that can sleep, with a status page",
        description="A small text server: POST /generate, control routes, and a status page. It "
        "listens on this machine only, unless it is told otherwise and given a token.",
    )
    parser.add_argument(
        "--model",
        metavar="DIR",
        help="folder of a causal Hugging Face model with safetensors; without it the server "
        "makes a small Llama-like model with random weights",
    )
    parser.add_argument("--host", default="127.0.0.1", help="address (default: 127.0.0.1)")
    parser.add_argument(
        "--port", type=_port, default=8000, help="0 takes a free one (default: 8000)"
    )
    parser.add_argument(
        "--token-file", metavar="FILE", type=Path, help="file with the token that clients must send"
    )
    parser.add_argument(
        "--allow-host", metavar="NAME", action="append", default=[], help="a name of this server"
    )
    parser.add_argument(
        "--context",
        metavar="TOKENS",
        type=int,
        help="longest text (default: 1024, or as long as the model was made for)",
    )
    parser.add_argument(
        "--auto-wake", action="store_true", help="a request that finds it asleep wakes it"
    )
    parser.add_argument(
        "--idle-seconds", metavar="S", type=float, help="sleep after so long without a request"
    )
    parser.add_argument(
        "--most-waiting",
        metavar="N",
        type=int,
        default=_MOST_WAITING,
        help=f"texts that may wait for their turn or a wake (default: {_MOST_WAITING}); "
        "a further one is told 503 at once",
    )
    parser.add_argument(
        "--no-graph", action="store_true", help="call each decode step; on a GPU it is captured"
    )


def run(chosen: argparse.Namespace, say: Say) -> int:
    """Serves until it is interrupted; returns the exit status.

    Raises:
        DemoError: the server, or this model, cannot be run like this.
        ValueError, OSError, CumemError: wrong arguments, an address in use, no memory.
    """
    try:
        from cumem.serving import server
    except ImportError as error:
        raise DemoError(f'serve needs more ({error}): pip install "cumem[serve]"') from error
    from cumem.serving.engine import TextEngine

    if chosen.context is not None and chosen.context < 2:
        raise ValueError(f"--context must be at least 2, not {chosen.context}")
    options = ServingOptions(
        auto_wake=chosen.auto_wake,
        idle_seconds=chosen.idle_seconds,
        most_waiting=chosen.most_waiting,
    )
    listening = server.Listening(
        chosen.host, chosen.port, _token(chosen.token_file), tuple(chosen.allow_host)
    )
    with listening.open() as opened:
        model = _model(chosen.model)
        engine = TextEngine(model, _context(chosen.context, model), graph=not chosen.no_graph)
        _introduce(engine, say)
        server.serve(engine, options, listening, opened, say)
    return 0


def _introduce(engine: Any, say: Say) -> None:
    loaded = engine.loaded
    say(f"model: {engine.model.title}, {loaded.tensors} tensors, {size(loaded.bytes)}")
    if outside := engine.outside():
        say(f"not in a pool, so it will not sleep: {', '.join(outside)}")


def _token(file: Path | None) -> str | None:
    if file is None:
        return None
    token = file.read_text().strip()
    if not token:
        raise ValueError(f"the token file {str(file)!r} is empty")
    return token


def _context(asked: int | None, model: TextModel) -> int:
    """Beyond its positions a model looks up what is not there, or talks nonsense."""
    most = model.most_tokens
    if asked is None:
        return _CONTEXT if most is None else min(_CONTEXT, most)
    if most is not None and asked > most:
        raise ValueError(
            f"--context {asked} is more than the {most} tokens that the model's positions are "
            f"made for ({model.title}); give at most {most}"
        )
    return asked


def _model(name: str | None) -> TextModel:
    if name is None:
        from cumem.serving.own_text import OwnText

        return OwnText(_OWN_BYTES[_runtime.current().emulated])
    from cumem.serving.folder_text import FolderText

    return FolderText(find_folder(name))
