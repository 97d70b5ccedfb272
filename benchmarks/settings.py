"""What can be asked of a benchmark? Without torch, so that the script that asks starts at once."""

from __future__ import annotations

import argparse
import math
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, TypeVar

GIB = 1 << 30
MIB = 1 << 20

FILL_NAMES = ("gaussian", "random")
PEER_SCENARIOS = ("later", "kv")

_Settings = TypeVar("_Settings")


@dataclass(frozen=True)
class SleepSettings:
    """One process of ``bench_sleep.py``; sizes in GiB, times in seconds."""

    adapter: str = "cumem"
    scenario: str = "later"
    gib: float = 16.0
    kv_gib: float = 64.0
    kv_tensors: int = 64
    many: int = 10_000  # small tensors of the scenario of that name
    cycles: int = 5
    changed: tuple[int, ...] = (100, 1, 0)  # per cent of the weights' tensors
    fill: str = "random"
    rest: float = 0.5  # between a sleep and its wake
    row_seconds: float = 15.0  # a row takes no further sample after this


@dataclass(frozen=True)
class SwitchSettings:
    """One process of ``bench_switch.py``; sizes in GiB, times in seconds."""

    adapter: str = "cumem"
    gib: float = 16.0  # each of the two models
    slack_gib: float = 2.0  # device memory left beside one of them
    cycles: int = 5
    fill: str = "random"
    rest: float = 0.3  # before each switch
    row_seconds: float = 15.0


def from_json(kind: type[_Settings], values: Mapping[str, Any]) -> _Settings:
    """Settings that went through JSON, which has no tuples."""
    return kind(**{key: tuple(v) if isinstance(v, list) else v for key, v in values.items()})


def chosen(kind: type[_Settings], arguments: argparse.Namespace, **given: Any) -> _Settings:
    """The settings that the command line asks for."""
    names = [field.name for field in fields(kind)]  # type: ignore[arg-type]
    asked = {name: getattr(arguments, name) for name in names if name not in given}
    return kind(**asked, **given)


def size(text: str) -> float:
    """A size in GiB, or seconds: not negative, not infinite."""
    value = float(text)
    if not math.isfinite(value) or value < 0:
        raise argparse.ArgumentTypeError(f"not a finite number from 0 on: {text}")
    return value


def count(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"not a positive number: {text}")
    return value


def percent(text: str) -> int:
    value = int(text)
    if not 0 <= value <= 100:
        raise argparse.ArgumentTypeError(f"not a per cent: {text}")
    return value


def percents(text: str) -> tuple[int, ...]:
    return tuple(percent(part) for part in text.split(","))


def add_common(parser: argparse.ArgumentParser, default: SleepSettings | SwitchSettings) -> None:
    """The options that mean the same in every script."""
    parser.add_argument("--gib", type=size, default=default.gib, help="size of the weights")
    parser.add_argument(
        "--cycles", type=count, default=default.cycles, help="samples of each row but the first"
    )
    parser.add_argument("--fill", choices=FILL_NAMES, default=default.fill)
    parser.add_argument(
        "--rest",
        type=size,
        default=default.rest,
        metavar="SECONDS",
        help="for the driver to scrub what was released, but in the rows 'at once'",
    )
    parser.add_argument(
        "--row-seconds",
        type=size,
        default=default.row_seconds,
        metavar="SECONDS",
        help="a row that has taken so long gets no further sample",
    )
    add_outputs(parser)


def add_outputs(parser: argparse.ArgumentParser) -> None:
    """Where results go, of a benchmark whose rows can be drawn."""
    add_json(parser)
    parser.add_argument("--plot", type=Path, metavar="FILE", help="a picture; needs matplotlib")


def add_pretouch(parser: argparse.ArgumentParser) -> None:
    """Adds ``--pretouch``."""
    parser.add_argument(
        "--pretouch",
        type=size,
        default=0.0,
        metavar="GIB",
        help="host memory to touch and free before anything is measured",
    )


def add_json(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", type=Path, metavar="FILE", help="where results go")
