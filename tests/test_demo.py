"""Does the demo find out whether a model came back from sleep as it was, and say so?"""

from __future__ import annotations

import itertools
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import cumem
from cumem import _demo_llama, demo
from cumem._demo_subject import DemoError
from cumem.testing import EmulatedDriver, emulated_driver

MIB = 1 << 20
SIZE = 3 * MIB
STEPS = (
    *("start", "model constructed", "checkpoint copied", "KV cache allocated"),
    *("first run", "asleep", "awake", "run again"),
)


def command(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "cumem", "demo", *arguments],
        # One thread: on a busy machine two spend their time waiting for each other.
        env={**os.environ, "CUMEM_DRIVER": "emulated", "OMP_NUM_THREADS": "1", **environment},
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )


def rows(output: str) -> dict[str, list[str]]:
    """The table: cells by step, in bytes of the units they are printed in."""
    table = {}
    for line in output.splitlines():
        for step in STEPS:
            if line.startswith(step):
                table[step] = re.split(r" {2,}", line.removeprefix(step).strip())
    return table


def assert_identical(done: subprocess.CompletedProcess[str]) -> dict[str, list[str]]:
    assert (done.returncode, done.stderr) == (0, ""), done.stderr
    assert done.stdout.endswith(
        "Identical: every pointer and every bit is what it was before the sleep.\n"
    )
    table = rows(done.stdout)
    assert tuple(table) == STEPS
    assert all(len(cells) == 6 for cells in table.values())
    return table


@pytest.fixture(scope="module")
def temporary_files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("temporary")


@pytest.fixture(scope="module")
def small(temporary_files: Path) -> subprocess.CompletedProcess[str]:
    return command("--size", "3M", TMPDIR=str(temporary_files))


def test_demo_on_the_emulator_shows_each_step_and_ends_with_status_0(
    small: subprocess.CompletedProcess[str], temporary_files: Path
) -> None:
    table = assert_identical(small)
    live, reserved, tracked, segments, used, host = zip(*table.values(), strict=True)
    assert used[0] == used[STEPS.index("asleep")] == "0 B"
    assert used[STEPS.index("first run")] == used[STEPS.index("awake")] == tracked[-1]
    assert len(set(tracked[3:])) == len(set(live[3:])) == len(set(segments[3:])) == 1
    assert reserved == tracked
    loaded = STEPS.index("checkpoint copied")
    assert set(host[:loaded]) == {"0 B"}
    assert "0 B" not in host[loaded:]  # what the load went through, then the backups
    assert not list(temporary_files.glob("cumem*")), "the checkpoint was left behind"


@pytest.mark.parametrize(
    "pattern",
    [
        r"loaded:   11 tensors, 2\.4 MiB, from 1 file",
        r"covered:  all 12 parameters and buffers are in pool 'weights', all 1 cache tensors",
        r"sleep:    slept kv_cache, weights: freed 24\.0 MiB, offloaded 2\.4 MiB",
        r"memory:   in use on the device: 24\.0 MiB before, 0 B asleep; 24\.0 MiB went back",
        r"wake:     woke kv_cache, weights: .* contents undefined: kv_cache",
        r"pointers: all 13 are the same",
        r"contents: all 12 parameters and buffers have the same bits",
        r"output:   all \d+ bytes are the same",
    ],
)
def test_demo_says_below_the_table(small: subprocess.CompletedProcess[str], pattern: str) -> None:
    assert re.search(pattern, small.stdout)


def test_demo_scales_its_model_to_the_memory_of_the_device() -> None:
    sizes = []
    for capacity in (64 * MIB, 256 * MIB):
        with emulated_driver(capacity_bytes=capacity):
            status, text = run_here(None)
        found = re.search(r"([\d.]+) million parameters", text)
        assert (status, found is not None) == (0, True)
        sizes.append(float(found[1]) if found else 0.0)
    assert sizes[0] * 3 < sizes[1]


@pytest.mark.parametrize("mib", [1, 4, 16, 64, 256, 1024, 4096, 65_536])
def test_own_model_is_as_large_as_asked_for_with_real_proportions(mib: int) -> None:
    shape = _demo_llama.shape_of(mib * MIB)
    with torch.device("meta"):
        model = _demo_llama.Llama(shape)
    assert sum(parameter.nbytes for parameter in model.parameters()) == shape.bytes
    assert shape.bytes <= max(mib * MIB, SIZE)
    assert shape.bytes > mib * MIB * 0.7
    assert shape.heads % shape.kv_heads == 0
    assert shape.heads > shape.kv_heads
    assert shape.heads * shape.head_size == shape.hidden


# What the demo finds


@pytest.fixture
def machine() -> Iterator[EmulatedDriver]:
    with emulated_driver(capacity_bytes=128 * MIB) as driver:
        yield driver


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def run_here(size: int | None = SIZE) -> tuple[int, str]:
    lines: list[str] = []
    status = demo.run(None, size, lines.append)
    return status, "\n".join(lines)


@pytest.mark.usefixtures("machine")
def test_changed_weight_is_found_and_named(monkeypatch: pytest.MonkeyPatch) -> None:
    models: list[torch.nn.Module] = []
    build, wake_up = _demo_llama.LlamaModel.build, cumem.wake_up

    def remember(self: Any, device: torch.device) -> torch.nn.Module:
        models.append(build(self, device))
        return models[0]

    def wake_and_flip_a_bit() -> cumem.WakeReport:
        report = wake_up()
        models[0].get_parameter("norm.weight").view(torch.uint8)[3] ^= 1
        return report

    monkeypatch.setattr(_demo_llama.LlamaModel, "build", remember)
    monkeypatch.setattr(cumem, "wake_up", wake_and_flip_a_bit)
    status, text = run_here()
    assert status == 1
    assert "contents: contents changed: norm.weight" in text
    assert "NOT identical: contents changed: norm.weight" in text
    assert "bytes of the output differ" in text


@pytest.mark.usefixtures("machine")
def test_tensor_outside_of_its_pool_is_found_and_named(monkeypatch: pytest.MonkeyPatch) -> None:
    build = _demo_llama.LlamaModel.build

    def build_with_host_memory(self: Any, device: torch.device) -> torch.nn.Module:
        model = build(self, device)
        model.register_buffer("mask", torch.frombuffer(bytearray(8), dtype=torch.uint8), False)
        return model

    monkeypatch.setattr(_demo_llama.LlamaModel, "build", build_with_host_memory)
    status, text = run_here()
    assert status == 1
    assert "NOT identical: not in their pools: mask" in text


@pytest.mark.usefixtures("machine")
def test_model_that_disagrees_with_itself_is_no_proof_of_anything(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    runs = itertools.count()
    monkeypatch.setattr(_demo_llama.LlamaModel, "run", lambda *_: torch.tensor([float(next(runs))]))
    with pytest.raises(DemoError, match="not deterministic on this device"):
        run_here()
    assert not cumem.is_sleeping()


@pytest.mark.usefixtures("machine")
def test_output_that_changes_after_the_wake_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    outputs = iter([torch.tensor([0.0]), torch.tensor([0.0]), torch.tensor([-0.0])])
    monkeypatch.setattr(_demo_llama.LlamaModel, "run", lambda *_: next(outputs))
    monkeypatch.setattr(_demo_llama.LlamaModel, "describe", lambda *_: "made up")
    status, text = run_here()
    assert status == 1
    assert "NOT identical: 1 of 4 bytes of the output differ" in text


@pytest.mark.usefixtures("machine")
def test_model_that_does_not_fit_is_refused_before_anything_is_allocated() -> None:
    with pytest.raises(DemoError, match=r"do not fit into 128\.0 MiB of free device memory"):
        demo.run(None, 100 * MIB, lambda line: None)
    assert cumem.stats().segment_bytes == 0


def test_refused_driver_call_ends_the_command_with_status_1_and_the_reason(
    machine: EmulatedDriver, capsys: pytest.CaptureFixture[str]
) -> None:
    from cumem.__main__ import main

    machine.fail("cuMemUnmap", code="CUDA_ERROR_UNKNOWN")
    assert main(["demo", "--size", "3M"]) == 1
    shown = capsys.readouterr()
    assert shown.err.startswith("cumem demo: sleep(): cuMemUnmap")
    assert "CUDA_ERROR_UNKNOWN" in shown.err
    machine.clear()
    cumem.wake_up()
