"""Does another process learn where memory is, and nobody else?"""

from __future__ import annotations

import errno
import json
import os
import socket
import stat
import sys
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from support import MIB, run_fresh, run_process

import cumem
from cumem import _gpu_processes, answering
from cumem.__main__ import main
from cumem.testing import emulated_driver


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    return tmp_path / "cumem"


@pytest.fixture
def weights() -> Iterator[torch.Tensor]:
    with emulated_driver(capacity_bytes=64 * MIB):
        with cumem.use_memory_pool("weights"):
            tensor = torch.ones(MIB)
        yield tensor


def shown(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    status = main(["report", *arguments])
    captured = capsys.readouterr()
    return status, captured.out, captured.err


@pytest.mark.usefixtures("weights")
def test_a_process_that_agreed_tells_what_report_says(capsys: pytest.CaptureFixture[str]) -> None:
    with cumem.serve_reports():
        status, out, err = shown(capsys, "--pid", str(os.getpid()))
        assert (status, err) == (0, "")
        assert out.startswith(f"process {os.getpid()}\n")
        assert "weights" in out
        status, out, _ = shown(capsys, "--pid", str(os.getpid()), "--json")
        assert json.loads(out) == json.loads(cumem.report().to_json())
        status, out, _ = shown(capsys, "--json")
        assert list(json.loads(out)) == [str(os.getpid())]


def test_two_servers_of_a_process_end_each_on_its_own(folder: Path) -> None:
    library = cumem.serve_reports()
    with cumem.serve_reports():
        assert answering.ask(os.getpid()) is not None
    assert answering.ask(os.getpid()) is not None, "the library's server is still there"
    with cumem.serve_reports():
        library.close()
        library.close()
        assert answering.ask(os.getpid()) is not None
    assert answering.ask(os.getpid()) is None
    assert list(folder.iterdir()) == []


@pytest.mark.usefixtures("weights")
def test_another_process_is_asked_from_outside(folder: Path) -> None:
    with cumem.serve_reports():
        done = run_fresh(
            f"from cumem.__main__ import main; main(['report', '--pid', '{os.getpid()}'])",
            {"XDG_RUNTIME_DIR": str(folder.parent)},
        )
    assert "weights" in done.stdout


def test_only_this_user_can_reach_the_socket(folder: Path) -> None:
    with cumem.serve_reports() as server:
        assert server.path.parent == folder
        assert stat.S_IMODE(folder.stat().st_mode) == 0o700
        assert stat.S_IMODE(server.path.stat().st_mode) == 0o600
    assert not server.path.exists()
    server.close()


@pytest.mark.parametrize("kind", ["open to others", "a link"])
def test_a_folder_that_others_can_enter_is_refused(
    folder: Path, kind: str, capsys: pytest.CaptureFixture[str]
) -> None:
    if kind == "a link":
        folder.symlink_to(folder.parent)
    else:
        folder.mkdir(mode=0o755)
        folder.chmod(0o755)
    with pytest.raises(cumem.CumemError, match="not a folder of this user alone"):
        cumem.serve_reports()
    assert not list(folder.glob("*.sock"))
    status, _, err = shown(capsys)
    assert status == 1
    assert "not a folder of this user alone" in err


def test_a_socket_that_a_dead_process_left_is_no_answer(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder.mkdir(mode=0o700)
    with socket.socket(socket.AF_UNIX) as left:
        left.bind(str(folder / f"{os.getpid()}.sock"))
    assert answering.ask(os.getpid()) is None
    status, _, err = shown(capsys)
    assert status == 1
    assert "no process of this user answers; call cumem.serve_reports()" in err
    with cumem.serve_reports():
        assert answering.ask(os.getpid()) is not None


def test_an_error_of_the_report_reaches_who_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    def failing() -> Any:
        raise cumem.DriverError("the driver is gone")

    monkeypatch.setattr(answering, "report", failing)
    with cumem.serve_reports(), pytest.raises(cumem.CumemError, match="the driver is gone"):
        answering.ask(os.getpid())


def test_a_fault_of_one_report_does_not_end_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    with cumem.serve_reports():
        with monkeypatch.context() as patch:
            patch.setattr(answering, "report", lambda: 1 // 0)
            with pytest.raises(cumem.CumemError, match=r"its report failed \(ZeroDivisionError"):
                answering.ask(os.getpid())
        assert answering.ask(os.getpid()) is not None


def test_a_process_that_had_too_many_files_open_answers_when_it_has_not(
    monkeypatch: pytest.MonkeyPatch, folder: Path
) -> None:
    refusals, accept = [OSError(errno.EMFILE, os.strerror(errno.EMFILE))] * 2, socket.socket.accept

    def refused_at_first(listener: socket.socket) -> Any:
        if refusals:
            raise refusals.pop()
        return accept(listener)

    monkeypatch.setattr(answering, "_PAUSE", 0.01)
    monkeypatch.setattr(socket.socket, "accept", refused_at_first)
    with cumem.serve_reports():
        assert answering.ask(os.getpid()) is not None
    assert not refusals
    assert list(folder.iterdir()) == []


def test_an_answer_that_is_broken_off_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(answering, "_answer", lambda: b'{"text": "half')
    with cumem.serve_reports(), pytest.raises(cumem.CumemError, match="broke its answer off"):
        answering.ask(os.getpid())


def test_the_process_ends_in_time_and_takes_its_socket_along(folder: Path) -> None:
    run_fresh("import cumem; cumem.serve_reports()", {"XDG_RUNTIME_DIR": str(folder.parent)})
    assert list(folder.iterdir()) == []


# A process that does not answer


def fake_nvml(monkeypatch: pytest.MonkeyPatch, processes: list[tuple[int, int | None]]) -> None:
    found = [types.SimpleNamespace(pid=pid, usedGpuMemory=used) for pid, used in processes]
    module: Any = types.ModuleType("pynvml")
    module.NVMLError = type("NVMLError", (Exception,), {})
    module.nvmlInit = module.nvmlShutdown = lambda: None
    module.nvmlDeviceGetCount = lambda: 1
    module.nvmlDeviceGetHandleByIndex = module.nvmlDeviceGetHandleByUUID = lambda which: which
    module.nvmlDeviceGetComputeRunningProcesses = lambda handle: found
    monkeypatch.setitem(sys.modules, "pynvml", module)


def test_of_a_silent_process_the_driver_tells_the_bytes(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    fake_nvml(monkeypatch, [(7, None), (12, 3 << 30)])
    status, out, _ = shown(capsys, "--pid", "12")
    assert status == 0
    assert "gpu 0: 3.0 GiB" in out
    assert "It does not answer" in out
    assert "gpu 0: not told" in shown(capsys, "--pid", "7")[1]
    status, out, _ = shown(capsys, "--pid", "12", "--json")
    assert json.loads(out) == {"used_bytes": {"gpu 0": 3 << 30}}


def test_an_unknown_process_is_an_error_that_says_what_to_do(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    fake_nvml(monkeypatch, [(12, 3 << 30)])
    status, out, err = shown(capsys, "--pid", "13")
    assert (status, out) == (1, "")
    assert "process 13 does not answer (call cumem.serve_reports()" in err


def test_without_the_management_library_the_error_names_it(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", None)
    status, _, err = shown(capsys, "--pid", "1")
    assert status == 1
    assert "pip install nvidia-ml-py" in err


def test_processes_on_a_device_are_listed_by_number(monkeypatch: pytest.MonkeyPatch) -> None:
    fake_nvml(monkeypatch, [(12, 3 << 30), (7, None)])
    found = _gpu_processes.on_device("GPU-1")
    assert [(process.pid, process.bytes) for process in found] == [(7, None), (12, 3 << 30)]
    assert _gpu_processes.on_device(None) == ()


def test_report_before_first_use_is_empty() -> None:
    done = run_process("import cumem; print(cumem.report().devices, cumem.report())")
    assert done.stdout == "() host: 0 B held (0 B pinned), 0 B in backups\n"
