"""Does the command line say what it does, and end with the right status?"""

from __future__ import annotations

import dataclasses
import gc
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import cumem
from cumem import _C, _info, _runtime, options
from cumem.__main__ import main
from cumem.testing import EmulatedDriver, emulated_driver

NO_GPU = {"CUDA_VISIBLE_DEVICES": ""}
# CUdevice_attribute
VIRTUAL_MEMORY, POSIX_HANDLES, RDMA = 102, 103, 110
CHOSEN = ("CUMEM_DRIVER", "CUMEM_EMULATED_CAPACITY", "CUMEM_EMULATED_DEVICES")


def run(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Runs the command line on a machine without a GPU."""
    inherited = {name: value for name, value in os.environ.items() if name not in CHOSEN}
    return subprocess.run(
        [sys.executable, "-m", "cumem", *arguments],
        env={**inherited, **NO_GPU, "OMP_NUM_THREADS": "1", **environment},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "the following arguments are required"),
        (["sing"], "invalid choice: 'sing'"),
        (["demo", "--size", "0"], "not a size: '0'; give one such as 64MiB"),
        (["demo", "--size", "12 parsecs"], "not a size: '12 parsecs'"),
        (["demo", "--size", "-5"], "not a size: '-5'"),
        (["demo", "--size", "1M", "--model", "x"], "not allowed with argument --size"),
    ],
)
def test_wrong_arguments_end_with_status_2_and_the_choices(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as caught:
        main(arguments)
    assert caught.value.code == 2
    assert message in capsys.readouterr().err


def test_version_is_the_package_version(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["--version"])
    assert (caught.value.code, capsys.readouterr().out) == (0, f"cumem {cumem.__version__}\n")


def test_without_a_gpu_the_command_line_takes_the_emulator_and_says_so() -> None:
    done = run("demo", "--size", "1MiB")
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith(
        "This runs on the emulated driver, because no GPU can be used here: "
    )


def test_a_driver_that_was_asked_for_is_never_replaced_by_another() -> None:
    done = run("demo", CUMEM_DRIVER="cuda")
    assert (done.returncode, done.stdout) == (1, "")
    assert "CUMEM_DRIVER=emulated" in done.stderr
    assert "Traceback" not in done.stderr


def test_unknown_driver_is_refused_with_the_choices() -> None:
    done = run("info", CUMEM_DRIVER="vulkan")
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr == (
        "cumem info: unknown CUMEM_DRIVER 'vulkan'; choices: 'cuda', 'emulated'\n"
    )


def test_output_that_nobody_reads_to_the_end_is_no_traceback() -> None:
    done = subprocess.run(
        f"{sys.executable} -m cumem info | true",
        shell=True,
        env={**os.environ, "CUMEM_DRIVER": "emulated"},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.stderr == ""


# info


def test_info_is_one_screen_and_works_without_a_gpu() -> None:
    done = run("info")
    assert (done.returncode, done.stderr) == (0, "")
    lines = done.stdout.splitlines()
    assert len(lines) <= 24
    labels = [line.split()[0] for line in lines if not line.startswith(" ")]
    assert labels == ["versions", "driver", "cpu:0", "host", "sleep", "torch", "missing"]
    for text in (
        f"cumem {cumem.__version__}, torch {torch.__version__}",
        "because no GPU can be used here",
        "granularity 2.0 MiB",
        "POSIX file descriptors yes",
        "GPUDirect RDMA yes",
        "transparent huge pages: ",
        "NUMA node(s)",
        "came back bit for bit; pinning host memory works",
        "of it on huge pages",
        "expandable segments off",
        "GPU memory: the driver is emulated",
    ):
        assert text in done.stdout


def test_info_says_which_driver_was_asked_for_and_the_torch_settings() -> None:
    done = run(
        "info",
        CUMEM_DRIVER="emulated",
        CUMEM_EMULATED_DEVICES="2",
        PYTORCH_ALLOC_CONF="expandable_segments:True",
    )
    assert done.returncode == 0
    assert "because CUMEM_DRIVER is 'emulated'" in done.stdout
    assert "cpu:1 " in done.stdout
    assert "expandable segments on, but off inside a scope" in done.stdout


@pytest.fixture
def machine() -> Iterator[EmulatedDriver]:
    with emulated_driver(capacity_bytes=64 << 20) as driver:
        yield driver


def info() -> str:
    return "\n".join(_info.lines(_runtime.current(), "a test says so"))


@pytest.mark.usefixtures("machine")
def test_info_leaves_nothing_behind() -> None:
    info()
    assert cumem.stats().segment_bytes == 0
    assert not cumem.is_sleeping()


def test_info_names_what_is_missing(machine: EmulatedDriver) -> None:
    machine.refuse_pinning()
    text = info()
    assert "bit for bit; pinning host memory refused" in text
    assert "pinned host memory: the driver refused" in text


@pytest.mark.usefixtures("machine")
def test_info_does_not_miss_what_is_not_wanted() -> None:
    cumem.configure(cumem.Options(pin_backups=False))
    text = info()
    assert "pinning host memory not wanted" in text
    assert "the driver refused" not in text


def test_info_says_why_a_sleep_cannot_work(machine: EmulatedDriver) -> None:
    info()
    machine.fail("cuMemCreate")
    machine.fail("cuMemUnmap")
    text = info()
    assert "sleep     failed" in text
    assert "sleep and wake: " in text
    machine.clear()


def test_info_tells_a_refused_feature_from_one_that_is_not_offered(
    machine: EmulatedDriver,
) -> None:
    used = _runtime.current()
    machine.fail("cuMemCreate", code="CUDA_ERROR_NOT_SUPPORTED")  # the first of the probes
    afresh = _C.Allocator(used.driver, _runtime.core_config(cumem.Options()))
    runtime = dataclasses.replace(used, allocator=afresh)
    text = "\n".join(_info.lines(runtime, "a test says so"))
    assert "POSIX file descriptors yes, GPUDirect RDMA no" in text
    assert "GPUDirect RDMA on cpu:0: refused when it was tried" in text


@pytest.mark.parametrize(
    ("attribute", "shown", "missing"),
    [
        (VIRTUAL_MEMORY, "virtual memory management no", "cumem cannot use it"),
        (POSIX_HANDLES, "POSIX file descriptors no", "POSIX file descriptors on cpu:0: not"),
        (RDMA, "GPUDirect RDMA no", "GPUDirect RDMA on cpu:0: not offered"),
    ],
)
def test_info_says_what_a_device_does_not_offer(
    machine: EmulatedDriver, attribute: int, shown: str, missing: str
) -> None:
    used = _runtime.current()
    machine.set_attribute(attribute, 0)
    afresh = _C.Allocator(used.driver, _runtime.core_config(cumem.Options()))
    runtime = dataclasses.replace(used, allocator=afresh)
    text = "\n".join(_info.lines(runtime, "a test says so"))
    assert shown in text
    assert missing in text


# timeline


def test_timeline_shows_each_step_in_every_form(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "steps.json"
    gc.collect()  # as torch's, the count of live bytes is the process's
    with emulated_driver(capacity_bytes=256 << 20):
        assert main(["timeline", "--size", "1MiB", "--markdown", "--json", str(file)]) == 0
    steps = [
        *("before constructor", "after constructor", "after checkpoint copy", "after post-load"),
        *("asleep: weights", "awake: weights"),
    ]
    marks = json.loads(file.read_text())["marks"]
    assert [mark["label"] for mark in marks] == steps
    lines = capsys.readouterr().out.splitlines()
    rows = [line for line in lines if line.startswith("| ")][2:]
    assert [row.split("|")[1].strip() for row in rows] == steps
    before, built, copied, finished, asleep, awake = marks
    assert before["tracked_bytes"] == 0
    assert built["tracked_bytes"] >= built["live_bytes"] - before["live_bytes"] > 0
    assert [
        (mark["live_bytes"], mark["tracked_bytes"]) for mark in (copied, finished, asleep, awake)
    ] == [(built["live_bytes"], built["tracked_bytes"])] * 4
    assert asleep["mapped_bytes"] == 0
    assert awake["mapped_bytes"] == built["mapped_bytes"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--json", "missing/steps.json"], "there is no folder for 'missing/steps.json'"),
        (["--plot", "missing/steps.svg"], "there is no folder for 'missing/steps.svg'"),
        (["--plot", "steps.svg"], "pip install 'cumem[plot]'"),
    ],
)
def test_timeline_says_what_it_cannot_write_before_it_builds_a_model(
    arguments: list[str],
    message: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    assert main(["timeline", *arguments]) == 1
    shown = capsys.readouterr()
    assert (shown.out, message in shown.err) == ("", True)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("name", ["CUMEM_EMULATED_CAPACITY", "CUMEM_EMULATED_DEVICES"])
@pytest.mark.parametrize("value", ["1GiB", "0", "-1"])
def test_an_emulated_machine_that_cannot_be_is_refused(
    monkeypatch: pytest.MonkeyPatch, name: str, value: str
) -> None:
    monkeypatch.setenv(name, value)
    with pytest.raises(ValueError, match=f"{name} must be a positive whole number"):
        options.check_emulated_machine()
