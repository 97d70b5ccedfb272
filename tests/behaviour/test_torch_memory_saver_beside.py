"""Does the drop-in show, here too, what a GPU's run compares with the original?

The programs and what is expected of them are those of ``tests/gpu/beside``.
"""

from __future__ import annotations

import gc
import io
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from support import MIB, DriverUnderTest
from torch_memory_saver_support import (
    saver_fixture,  # noqa: F401 - pytest finds fixtures by name
)

import cumem
from cumem.compat.torch_memory_saver import TorchMemorySaver

sys.path.append(str(Path(__file__).parent.parent / "gpu" / "beside"))

from saver_comparison import observe, wrong
from saver_edges import ALL
from saver_machine import Machine
from saver_worker import tell_scenario


@pytest.mark.machine(capacity_bytes=128 * MIB)
@pytest.mark.parametrize("name", ALL)
def test_the_drop_in_shows_what_is_expected(
    name: str, saver: TorchMemorySaver, driver: DriverUnderTest
) -> None:
    graphs = not driver.emulated
    machine = Machine(cumem.default_device(), 12 * MIB, driver.free_bytes, graphs=graphs)

    def here(library: str, names: Sequence[str]) -> tuple[list[dict[str, Any]], str]:
        told = io.StringIO()
        for each in names:
            tell_scenario(each, saver, machine, told)
        return [json.loads(line) for line in told.getvalue().splitlines()], ""

    shown = observe("cumem", [name], here)[name]
    if shown.missing:
        pytest.skip(f"capability: no {shown.missing}")
    assert wrong(ALL[name], shown) == []
    gc.collect()
    cumem.trim()
