"""Is nothing read as code, and is nothing of ours readable by others?"""

from __future__ import annotations

import ast
import json
import os
import stat
import struct
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file

import cumem
from cumem import _digest
from cumem.loading import load_into, read_checkpoint, read_header

PACKAGE = Path(cumem.__file__).parent
SOURCES = sorted(PACKAGE.glob("*.py"))

READS_CODE = {"pickle", "_pickle", "cPickle", "cloudpickle", "dill", "marshal", "shelve", "joblib"}
RUNS_TEXT = {"eval", "exec", "compile", "__import__"}
LOADS_PICKLE = {("torch", "load"), ("torch", "save"), ("numpy", "load"), ("np", "load")}


# Nothing is pickled


def imports(tree: ast.Module) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name.split(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield (node.module or "").split(".")[0]


def test_there_are_sources_to_look_at() -> None:
    assert len(SOURCES) > 20


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: path.name)
def test_no_module_reads_pickles_or_runs_text(path: Path) -> None:
    """K3, vllm#49879, cuda-python#2225."""
    tree = ast.parse(path.read_text())
    assert not READS_CODE & set(imports(tree))
    for node in ast.walk(tree):
        if not isinstance(node, ast.Call):
            continue
        called = node.func
        if isinstance(called, ast.Name):
            assert called.id not in RUNS_TEXT
        if isinstance(called, ast.Attribute) and isinstance(called.value, ast.Name):
            assert (called.value.id, called.attr) not in LOADS_PICKLE
            assert called.value.id != "os" or called.attr not in ("system", "popen")
        assert not any(word.arg == "shell" for word in node.keywords)


# Files are private from their first instant


@pytest.fixture
def _open_umask() -> Iterator[None]:
    """Nothing is taken away from a mode that a file is made with."""
    before = os.umask(0)
    yield
    os.umask(before)


def modes_seen_while(folder: Path, writes: Any) -> set[int]:
    """Modes of all files and folders below ``folder`` at any time while ``writes`` runs."""
    seen: set[int] = set()
    over = threading.Event()

    def look() -> None:
        while not over.is_set():
            for path in [*folder.rglob("*")]:
                try:
                    seen.add(stat.S_IMODE(path.stat().st_mode))
                except FileNotFoundError:
                    continue

    thread = threading.Thread(target=look)
    thread.start()
    try:
        writes()
    finally:
        over.set()
        thread.join()
    return seen | {stat.S_IMODE(path.stat().st_mode) for path in folder.rglob("*")}


@pytest.mark.usefixtures("_open_umask")
def test_the_cache_of_kernels_is_private_from_its_first_instant(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """K2, dynamo#12011, dynamo#12989: no window between the making of a file and its mode."""
    cache = tmp_path / "cache"
    cache.mkdir(mode=0o755)
    monkeypatch.setenv("XDG_CACHE_HOME", str(cache))
    made: list[int] = []
    opened = os.open

    def watched(path: Any, flags: int, mode: int = 0o777, **more: Any) -> int:
        if flags & os.O_CREAT:
            made.append(mode)
        return opened(path, flags, mode, **more)

    monkeypatch.setattr(os, "open", watched)

    def write() -> None:
        for number in range(200):
            _digest._store(cache / "cumem" / f"kernel-{number}.cubin", b"image" * 2000)

    modes = modes_seen_while(cache, write)
    assert all(mode & 0o077 == 0 for mode in modes), [oct(mode) for mode in modes]
    assert len(list((cache / "cumem").iterdir())) == 200
    assert all(mode & 0o077 == 0 for mode in made)


@pytest.mark.usefixtures("_open_umask")
def test_a_cache_file_replaces_a_link_and_does_not_follow_it(tmp_path: Path) -> None:
    """K3: a link that somebody left where the file goes is no way to write elsewhere."""
    victim = tmp_path / "victim"
    victim.write_bytes(b"mine")
    target = tmp_path / "cumem" / "kernel.cubin"
    target.parent.mkdir()
    target.symlink_to(victim)
    _digest._store(target, b"image")
    assert victim.read_bytes() == b"mine"
    assert not target.is_symlink()
    assert target.read_bytes() == b"image"


def test_a_cache_that_cannot_be_written_is_no_error(tmp_path: Path) -> None:
    blocked = tmp_path / "file"
    blocked.write_bytes(b"")
    _digest._store(blocked / "kernel.cubin", b"image")
    assert blocked.read_bytes() == b""


# Headers made to do harm


names = st.text(max_size=8)
numbers = st.one_of(
    st.integers(-3, 20), st.integers(), st.sampled_from([2**31, 2**63, 2**64, -1, 10**30])
)
values = st.recursive(
    st.none() | st.booleans() | numbers | st.floats() | names,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(names, inner, max_size=3),
    max_leaves=6,
)
entries = st.fixed_dictionaries(
    {},
    optional={
        "dtype": st.sampled_from(["U8", "F32", "BF16", "F4", "F7", "bool"]) | values,
        "shape": st.lists(numbers, max_size=4) | values,
        "data_offsets": st.lists(numbers, min_size=2, max_size=2) | values,
        "more": values,
    },
)
headers = st.dictionaries(names, entries | values, max_size=4) | values


@settings(max_examples=400, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    header=headers,
    length=st.none() | st.integers(0, 2**64 - 1),
    payload=st.integers(0, 40),
    space=st.binary(max_size=3),
)
def test_any_header_is_read_or_refused_and_nothing_is_allocated(
    tmp_path_factory: pytest.TempPathFactory,
    header: Any,
    length: int | None,
    payload: int,
    space: bytes,
) -> None:
    file = tmp_path_factory.getbasetemp() / "hostile.safetensors"
    text = json.dumps(header).encode() + space
    size = len(text) if length is None else length
    file.write_bytes(struct.pack("<Q", size) + text + bytes(payload))
    try:
        found = read_header(file)
    except cumem.CheckpointError:
        return
    assert all(8 + size <= entry.begin <= entry.end for entry in found.tensors.values())
    assert sum(entry.bytes for entry in found.tensors.values()) == payload
    assert file.stat().st_size == 8 + size + payload


@settings(max_examples=100, deadline=None, suppress_health_check=list(HealthCheck))
@given(data=st.binary(max_size=200))
def test_any_bytes_are_read_or_refused(
    tmp_path_factory: pytest.TempPathFactory, data: bytes
) -> None:
    file = tmp_path_factory.getbasetemp() / "noise.safetensors"
    file.write_bytes(data)
    try:
        read_checkpoint(file)
    except cumem.CheckpointError:
        return
    assert len(data) >= 10


@pytest.mark.parametrize("cut", [1, 9, 100, 4096])
def test_a_file_that_was_cut_writes_nothing(tmp_path: Path, cut: int) -> None:
    module = torch.nn.Linear(64, 64)
    file = tmp_path / "model.safetensors"
    save_file({name: torch.zeros_like(one) for name, one in module.state_dict().items()}, file)
    before = {name: one.clone() for name, one in module.state_dict().items()}
    os.truncate(file, file.stat().st_size - cut)
    with pytest.raises(cumem.CheckpointError, match="Nothing was loaded"):
        load_into(module, file)
    assert all(torch.equal(module.state_dict()[name], before[name]) for name in before)
