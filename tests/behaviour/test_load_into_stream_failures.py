"""Does a load in one stream that fails say what was written, and can it be repeated?"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import host_tensor, write_file, write_shards
from load_into_stream_support import (
    holds,
    linear,
    small_steps,  # noqa: F401 - pytest finds fixtures by name
    streamed,
    weights_of,
)
from support import DriverUnderTest, bytes_of, same_bytes, state

import cumem
from cumem import _streaming


def test_a_host_without_room_for_the_ring_still_loads(tmp_path: Path) -> None:
    module = linear()
    tensors = weights_of(module)
    path = write_file(tmp_path / "model.safetensors", tensors)
    cumem.configure(cumem.Options(host_limit_bytes=1000))
    before = streamed()
    cumem.load_into(module, path)
    assert streamed() == before
    assert holds(module, tensors)


@pytest.mark.needs("captures on request")
def test_a_capture_is_not_disturbed(driver: DriverUnderTest, tmp_path: Path) -> None:
    module = linear()
    path, before = write_file(tmp_path / "model.safetensors", weights_of(module)), bytes_of(module)
    driver.emulator.begin_capture()
    with pytest.raises(cumem.BusyError, match="load_into: a CUDA graph capture is under way"):
        cumem.load_into(module, path)
    driver.emulator.end_capture()
    assert bytes_of(module) == before


def test_a_file_that_shrinks_or_changes_while_it_is_streamed_says_what_was_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first shard comes whole, the second fails."""
    module = linear(2)
    tensors = weights_of(module)
    names = list(tensors)
    shards = {
        f"{at}.safetensors": {name: tensors[name] for name in names[2 * at : 2 * at + 2]}
        for at in range(2)
    }
    folder, flat, real = write_shards(tmp_path, shards), state(), _streaming.held_file
    second = folder / "1.safetensors"
    whole = second.read_bytes()

    def failing(change: Callable[[], object], match: str) -> None:
        def held(header: Any, left: str) -> Any:
            held_open = real(header, left)
            if header.path == second:
                change()
            return held_open

        monkeypatch.setattr(_streaming, "held_file", held)
        with pytest.raises(cumem.CheckpointError, match=match) as caught:
            cumem.load_into(module, folder)
        assert str(second) in str(caught.value)
        left = "2 of 4 tensors were written and are whole; the others are undefined now: load again"
        assert left in str(caught.value)
        assert all(same_bytes(module.state_dict()[name], tensors[name]) for name in names[:2])
        assert state() == flat
        assert not cumem.is_sleeping()
        second.write_bytes(whole)

    failing(lambda: os.truncate(second, 20_000), "cut short")
    failing(lambda: os.utime(second, (1, 1)), "has changed")
    monkeypatch.setattr(_streaming, "held_file", real)
    cumem.load_into(module, folder)
    assert holds(module, tensors)


def test_a_file_that_is_another_than_its_header_said_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = linear(1)
    path = write_file(tmp_path / "model.safetensors", weights_of(module))
    before, real = bytes_of(module), _streaming.held_file

    def held(*arguments: Any) -> Any:
        write_file(path, {"other": host_tensor(torch.uint8, (10,), 0)})
        return real(*arguments)

    monkeypatch.setattr(_streaming, "held_file", held)
    with pytest.raises(cumem.CheckpointError, match=r"changed while it was read.*0 of 2 tensors"):
        cumem.load_into(module, path)
    assert bytes_of(module) == before


@pytest.mark.parametrize("nth", [1, 2])
@pytest.mark.parametrize(
    "call",
    [
        *("cuEventCreate", "cuEventRecord", "cuEventSynchronize", "cuMemcpyHtoDAsync"),
        *("cuCtxPushCurrent", "cuCtxSynchronize"),
    ],
)
@pytest.mark.needs("failures on request")
def test_a_refusal_of_the_driver_leaves_the_module_awake_and_can_be_repeated(
    driver: DriverUnderTest, tmp_path: Path, call: str, nth: int
) -> None:
    module = linear(2)
    tensors = weights_of(module)
    names = list(tensors)
    shards = {f"{at}.safetensors": {n: tensors[n] for n in names[at::2]} for at in range(2)}
    folder = write_shards(tmp_path, shards)
    cumem.load_into(module, folder)  # what a device makes once is there
    flat = state()
    # The first context is pushed to ask for a capture: unanswered, there is none.
    asked = 1 if call == "cuCtxPushCurrent" else 0
    driver.emulator.fail(call, nth=asked + nth, code="CUDA_ERROR_UNKNOWN")
    with pytest.raises(cumem.DriverError, match=rf"load_into: {call}.*[02] of 4 tensors were wr"):
        cumem.load_into(module, folder)
    driver.emulator.clear()
    assert state() == flat
    assert not cumem.is_sleeping()
    cumem.check()
    cumem.load_into(module, folder)
    assert holds(module, tensors)
