"""Are the drop-ins measured as their originals are? On the emulator: no time matters here."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import cumem
from cumem.compat.torch_memory_saver import torch_memory_saver
from cumem.compat.vllm import CuMemAllocator
from cumem.testing import emulated_driver

BENCHMARKS = Path(__file__).parent.parent / "benchmarks"
MIB = 1 << 20

sys.path.append(str(BENCHMARKS))  # they are scripts, which import each other by name

adapters = importlib.import_module("adapters")
drop_ins = importlib.import_module("drop_ins")
libraries = importlib.import_module("libraries")
settings = importlib.import_module("settings")
tables = importlib.import_module("tables")
switch_worker = importlib.import_module("switch_worker")
worker = importlib.import_module("worker")

NAMES = [name for name in libraries.ADAPTERS if name.startswith("cumem-as-")]
EVERY_BYTE, ONE_OF_A_HUNDRED = "sleep: weights, 100 % changed", "sleep: weights, 1 % changed"


@pytest.fixture(autouse=True)
def machine() -> Iterator[None]:
    retained = torch_memory_saver.retain_cpu_backup
    with emulated_driver(capacity_bytes=256 * MIB):
        yield
    cumem.configure(cumem.Options())
    # Both are one for the process, and other tests look at them.
    torch_memory_saver.retain_cpu_backup = retained
    CuMemAllocator.instance = None


def measured(name: str, scenario: str) -> tuple[dict[str, Any], int]:
    """Last samples by row, and the bytes of the weights; contents and addresses are checked."""
    asked = settings.SleepSettings(
        name, scenario, gib=0.01, kv_gib=0.01, kv_tensors=4, cycles=1, rest=0.0
    )
    found = worker.measure(libraries.ADAPTERS[name](), asked)
    return {row["name"]: row["samples"][-1] for row in found["rows"]}, found["weights_bytes"]


def test_each_has_its_original_beside_it() -> None:
    assert NAMES == ["cumem-as-tms", "cumem-as-tms-retained", "cumem-as-vllm"]
    for name in NAMES:
        original = libraries.ADAPTERS[name.removeprefix("cumem-as-")]
        assert issubclass(libraries.ADAPTERS[name], original)
        assert not issubclass(libraries.ADAPTERS[name], adapters.CumemAdapter)


@pytest.mark.parametrize("scenario", ["kv", "both"])
@pytest.mark.parametrize("name", NAMES)
def test_caches_sleep_alone_and_beside_weights(name: str, scenario: str) -> None:
    rows, _ = measured(name, scenario)
    later = {"kv": "KV, at once", "both": "both"}[scenario]
    assert {f"sleep: {later}", f"wake:  {later}"} <= set(rows)


def test_without_retained_backups_all_is_copied_and_nothing_kept() -> None:
    rows, weights = measured("cumem-as-tms", "later")
    assert ONE_OF_A_HUNDRED not in rows
    assert rows[EVERY_BYTE]["copied_bytes"] == weights
    assert rows[EVERY_BYTE]["host_bytes"] >= weights
    assert rows["wake:  weights, 100 % changed"]["host_bytes"] == 0


def test_retained_backups_are_kept() -> None:
    rows, weights = measured("cumem-as-tms-retained", "later")
    assert rows[ONE_OF_A_HUNDRED]["copied_bytes"] is None  # the interface does not tell
    assert rows["wake:  weights, 1 % changed"]["host_bytes"] >= weights


def test_the_drop_in_for_vllm_tells_what_it_copied() -> None:
    rows, weights = measured("cumem-as-vllm", "later")
    assert rows[EVERY_BYTE]["copied_bytes"] >= weights
    assert 0 < rows[ONE_OF_A_HUNDRED]["copied_bytes"] < weights
    assert rows["wake:  weights, 1 % changed"]["copied_bytes"] >= weights


def test_a_table_has_each_drop_in_beside_its_original() -> None:
    assert libraries.originals(["vllm", "cumem", "cumem-as-tms", "cumem-as-vllm"]) == [
        ("vllm", "cumem-as-vllm")
    ]
    theirs = result_of("vllm", {"sleep: a": 0.5, "sleep: theirs": 1.0})
    ours = result_of("cumem-as-vllm", {"sleep: a": 0.25, "sleep: ours": 1.0})
    header, _, *lines = tables.beside_table(theirs, ours).splitlines()
    assert header.split() == ["row", "vllm", "ms", "cumem-as-vllm", "ms", "times", "as", "fast"]
    assert [line.split() for line in lines] == [["sleep:", "a", "500.0", "250.0", "2.00"]]


def result_of(name: str, medians: dict[str, float]) -> dict[str, Any]:
    rows = [{"name": row, "median_seconds": seconds} for row, seconds in medians.items()]
    return {"processes": [{"adapter": {"name": name}}], "rows": rows}


def test_what_wakes_all_other_tags_cannot_switch(tmp_path: Path) -> None:
    asked = settings.SwitchSettings("cumem-as-vllm", gib=0.01, slack_gib=0.02, cycles=1, rest=0.0)
    file = tmp_path / "answer"
    worker.answer(lambda: switch_worker.measure(drop_ins.CumemAsVllmAdapter(), asked), file)
    assert "unavailable" in file.read_text()
    assert "model_a" in file.read_text()
