"""Runs scenarios with one library, in a process that has no other; its arguments say which.

    python saver_worker.py LIBRARY RESULTS SCENARIO...

Writes a line of JSON for each thing that is seen, at once, so that what was seen before
the process ends is there.
"""

from __future__ import annotations

import ctypes
import json
import os
import subprocess
import sys
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from typing import Any, TextIO

import torch
from saver_edges import ALL
from saver_machine import MIB, Machine

_LIBRARIES = {
    "cumem": "cumem.compat.torch_memory_saver",
    "tms": "torch_memory_saver",
    "tms-preload": "torch_memory_saver",
}
_IMPORT_ERRORS = (ImportError, OSError, RuntimeError, AttributeError, AssertionError)


class UnavailableError(Exception):
    """The library cannot be used here; says what is missing."""


def main(library: str, file: str, names: Sequence[str]) -> None:
    """Runs the scenarios in order."""
    with Path(file).open("a", encoding="utf-8") as results:
        try:
            if library == "tms-preload" and not _has_preloaded_library():
                _again_with_preloaded_library()
                return
            saver = saver_of(library)
            with machine_of(library) as machine:
                for name in names:
                    tell_scenario(name, saver, machine, results)
        except UnavailableError as missing:
            _tell(results, unavailable=str(missing))


def tell_scenario(name: str, saver: Any, machine: Machine, results: TextIO) -> None:
    """Runs one scenario and tells what it sees; an error that escapes is seen, too."""
    _tell(results, scenario=name)
    scenario = ALL[name]
    if missing := scenario.lacks(machine):
        _tell(results, scenario=name, missing=missing)
        return
    try:
        for seen, value in scenario.program(saver, machine):
            _tell(results, scenario=name, seen=seen, value=value)
    except Exception as error:  # noqa: BLE001 - told with its text, and then compared
        traceback.print_exc()
        text = f"{type(error).__name__}: {error}".splitlines()[0]
        _tell(results, scenario=name, seen="error", value=text)
    _tell(results, scenario=name, finished=True)


def saver_of(library: str) -> Any:
    """The object that programs import."""
    try:
        saver = import_module(_LIBRARIES[library]).torch_memory_saver
        saver.hook_mode = "preload" if library == "tms-preload" else "torch"
        saver.retain_cpu_backup  # noqa: B018 - makes the original load its library
    except _IMPORT_ERRORS as error:
        raise UnavailableError(f"{_LIBRARIES[library]} ({error})") from error
    return saver


@contextmanager
def machine_of(library: str) -> Iterator[Machine]:
    """The first GPU, or for the drop-in the emulator where it is asked for."""
    if library == "cumem" and os.environ.get("CUMEM_DRIVER") == "emulated":
        with _emulated() as machine:
            yield machine
        return
    if not torch.cuda.is_available():
        raise UnavailableError("CUDA device")
    yield Machine(
        torch.device("cuda", 0),
        512 * MIB,
        lambda index: torch.cuda.mem_get_info(index)[0],
        graphs=True,
        devices=torch.cuda.device_count(),
    )


@contextmanager
def _emulated() -> Iterator[Machine]:
    from cumem.testing import emulated_driver

    capacity = 1024 * MIB
    with emulated_driver(capacity_bytes=capacity) as driver:
        cpu = torch.device("cpu")
        yield Machine(cpu, 16 * MIB, lambda index: capacity - driver.used_bytes(index))


def _has_preloaded_library() -> bool:
    """Was this process started with the original's library, and did the loader take it?"""
    if "torch_memory_saver" not in os.environ.get("LD_PRELOAD", ""):
        return False
    if not hasattr(ctypes.CDLL(None), "tms_pause"):
        raise UnavailableError("library to preload (the loader did not take it)")
    return True


def _again_with_preloaded_library() -> None:
    """This process once more, as the original has it started."""
    try:
        configured = import_module("torch_memory_saver").configure_subprocess()
        with configured:
            folders = [*_folders_of_the_runtime(), os.environ.get("LD_LIBRARY_PATH", "")]
            environment = {**os.environ, "LD_LIBRARY_PATH": ":".join(filter(None, folders))}
            if subprocess.run([sys.executable, "-c", ""], env=environment, check=False).returncode:
                raise UnavailableError("library to preload (no process starts with it)")
            done = subprocess.run([sys.executable, *sys.argv], env=environment, check=False)
    except _IMPORT_ERRORS as error:
        raise UnavailableError(f"library to preload ({error})") from error
    if done.returncode:
        os._exit(done.returncode % 256)


def _folders_of_the_runtime() -> list[str]:
    """Where the CUDA runtime is that torch loaded: the library to preload wants to find it."""
    lines = Path("/proc/self/maps").read_text(encoding="utf-8").splitlines()
    files = {line.split(maxsplit=5)[-1] for line in lines if "libcudart.so" in line}
    return sorted({str(Path(file).parent) for file in files})


def _tell(results: TextIO, **facts: Any) -> None:
    results.write(json.dumps(facts) + "\n")
    results.flush()


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], sys.argv[3:])
    sys.stdout.flush()
    os._exit(0)  # at a regular end the original frees outside of its regions, which ends it
