"""Do tensors that take a file's bytes as they are come in one stream, in order with other work?"""

from __future__ import annotations

import importlib
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import host_tensor, write_file, write_shards
from load_into_stream_support import (
    AS_THEY_ARE,
    KIB,
    ROWS,
    WIDTH,
    Mixed,
    bytes_in,
    expect,
    holds,
    linear,
    pooled,
    small_steps,  # noqa: F401 - pytest finds fixtures by name
    source,
    streamed,
    views,
    weights_of,
)
from support import MIB, DriverUnderTest, bytes_of, outside_scopes, same_bytes, state
from torch import nn

import cumem
from cumem import _streaming


def test_what_is_as_it_is_is_streamed_and_the_rest_converted(tmp_path: Path) -> None:
    module, tensors = pooled(Mixed), source()
    write_file(tmp_path / "model.safetensors", tensors, padding=3)
    cumem.load_into(module, tmp_path, name_map=views(module))  # takes memory for columns, once
    with torch.no_grad():
        for tensor in module.parameters():
            tensor.zero_()
    flat, before = state(), streamed()
    loaded = cumem.load_into(module, tmp_path, name_map=views(module))
    assert loaded.tensors == len(tensors)
    expect(module, tensors)
    assert state() == flat
    names = [name for name in AS_THEY_ARE if name != "head"]
    assert streamed() - before == bytes_in(tensors, *names)
    assert cumem.stats().host_bytes <= 64 * KIB


def test_one_tensor_may_be_streamed_to_some_places_and_copied_to_others(tmp_path: Path) -> None:
    """One of the file's tensors: rows to one module, to another in its type, columns to a third."""
    module = pooled(
        lambda: nn.ParameterDict(
            {
                "rows": torch.zeros(20, WIDTH),
                "row": torch.zeros(1, 7),
                "shorter": torch.zeros(ROWS - 20, WIDTH, dtype=torch.float16),
                "columns": torch.zeros(ROWS, 5),
            }
        )
    )
    with outside_scopes():
        whole = torch.randn(ROWS, WIDTH)
    write_file(tmp_path / "model.safetensors", {"whole": whole})
    before = streamed()
    parts = [
        (module["rows"], slice(0, 20)),
        (module["shorter"], slice(20, None)),
        (module["columns"], (slice(None), slice(3, 8))),
        (module["row"], (slice(5, 6), slice(2, 9))),
    ]
    cumem.load_into(module, tmp_path, name_map={"whole": parts})
    assert streamed() - before == (20 * WIDTH + 7) * 4
    with outside_scopes():
        for name, part in (
            ("rows", whole[:20]),
            ("shorter", whole[20:].half()),
            ("columns", whole[:, 3:8]),
            ("row", whole[5:6, 2:9]),
        ):
            assert torch.equal(module[name].detach().cpu(), part), name


def test_memory_that_is_not_cumems_is_copied_to_as_before(tmp_path: Path) -> None:
    module = nn.ModuleList([nn.Linear(30, 30), pooled(lambda: nn.Linear(30, 30))])
    tensors = weights_of(module)
    before = streamed()
    cumem.load_into(module, write_file(tmp_path / "model.safetensors", tensors))
    assert holds(module, tensors)
    assert streamed() - before == bytes_in(tensors, "1.weight", "1.bias")


@pytest.mark.machine(devices=2)
def test_shards_are_streamed_one_after_the_other_to_their_devices(tmp_path: Path) -> None:
    tensors = {f"t{at}": host_tensor(torch.int32, (5000 + at,), at) for at in range(8)}
    shards = {
        f"{at}.safetensors": {name: tensors[name] for name in list(tensors)[at::3]}
        for at in range(3)
    }
    module = nn.Module()
    for at, (name, tensor) in enumerate(tensors.items()):
        (tmp_path / "one").mkdir(exist_ok=True)
        path = write_file(tmp_path / "one" / name, {name: tensor})
        module.register_buffer(name, cumem.load_file(path, device=at % 2)[name].zero_())
    before = streamed()
    cumem.load_into(module, write_shards(tmp_path, shards))
    assert streamed() - before == bytes_in(tensors, *tensors)
    assert all(same_bytes(getattr(module, name), tensor) for name, tensor in tensors.items())


def test_a_snapshot_is_streamed_too(tmp_path: Path) -> None:
    module, fresh = linear(), linear()
    cumem.save_snapshot(tmp_path / "state", module)
    before = streamed()
    restored = cumem.restore_snapshot(tmp_path / "state", fresh)
    assert streamed() - before == restored.bytes
    assert bytes_of(fresh) == bytes_of(module)


def test_contents_that_were_streamed_sleep_and_autograd_notices_the_write(tmp_path: Path) -> None:
    module = linear()
    path = write_file(tmp_path / "model.safetensors", weights_of(module))
    cumem.mark_clean(module)
    cumem.sleep()
    cumem.wake_up()
    versions = [tensor._version for tensor in module.parameters()]
    cumem.load_into(module, path)
    assert all(
        tensor._version > version
        for tensor, version in zip(module.parameters(), versions, strict=True)
    )
    cumem.sleep()
    cumem.wake_up()
    assert holds(module, weights_of(module))


# In order with others


@pytest.mark.needs("slow work on request")
def test_work_that_was_pending_comes_first_and_a_sleep_meanwhile_is_refused(
    driver: DriverUnderTest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = linear()
    tensors = weights_of(module)
    path = write_file(tmp_path / "model.safetensors", tensors)
    started, real = threading.Event(), _streaming.held_file

    def held(*arguments: Any) -> Any:
        started.set()
        return real(*arguments)

    monkeypatch.setattr(_streaming, "held_file", held)
    late = bytes(160_000)
    driver.emulator.enqueue(write=(module[0].weight.data_ptr(), late), delay=0.5)

    def sleep_meanwhile() -> None:
        assert started.wait(30)
        with pytest.raises(cumem.BusyError, match="weights"):
            cumem.sleep()

    with ThreadPoolExecutor(1) as executor:
        refused = executor.submit(sleep_meanwhile)
        cumem.load_into(module, path)
        refused.result(timeout=60)
    assert holds(module, tensors)
    assert cumem.sleep().offloaded_bytes > 0
    cumem.wake_up()


# Progress


def test_progress_counts_what_is_streamed_and_what_is_converted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = []

    class Bar:
        """Stands in for tqdm's."""

        def __init__(self, *, total: int, **settings: object) -> None:
            self.total, self.n, self.disable = total, 0, settings["disable"]
            made.append(self)

        def update(self, step: int) -> None:
            self.n += step

        def __enter__(self) -> Bar:
            return self

        def __exit__(self, *error: object) -> None: ...

    class Module:
        tqdm = Bar

    original = importlib.import_module
    monkeypatch.setattr(
        importlib, "import_module", lambda name: Module if name == "tqdm" else original(name)
    )
    module, tensors = pooled(Mixed), source()
    write_file(tmp_path / "model.safetensors", tensors)
    cumem.load_into(module, tmp_path, name_map=views(module))
    (bar,) = made
    assert bar.disable is None  # asks whether it is a terminal
    assert bar.n == bar.total == bytes_in(tensors, *tensors) - tensors["head"].nbytes


def test_two_threads_may_load_at_once(tmp_path: Path) -> None:
    one, other = linear(2), linear(2)
    tensors = weights_of(one)
    path = write_file(tmp_path / "model.safetensors", tensors)
    with ThreadPoolExecutor(2) as executor:
        loads = [executor.submit(cumem.load_into, module, path) for module in (one, other)]
        assert [load.result(timeout=60).tensors for load in loads] == [4, 4]
    assert holds(one, tensors)
    assert holds(other, tensors)
    assert cumem.stats().host_bytes <= MIB
