"""Does memory come back from the pages of its file, and are they let go with its tensors?"""

from __future__ import annotations

import gc
import json
import os
from pathlib import Path

import pytest
import torch
from checkpoints import write_file
from reload_support import (
    TENSORS,
    configure,
    digests_are_there,  # noqa: F401 - pytest finds fixtures by name
    intact,
    path_fixture,  # noqa: F401 - pytest finds fixtures by name
    small_steps,  # noqa: F401 - pytest finds fixtures by name
)
from support import DriverUnderTest, fill_pattern, holds_pattern, make, state

import cumem
from cumem import _C


def load(path: Path) -> dict[str, torch.Tensor]:
    return cumem.load_file(path, on_sleep="reload", pin_file=True)


def pinned() -> int:
    return cumem.stats().pinned_file_bytes


def test_the_pages_stay_pinned_until_the_last_tensor_dies(path: Path) -> None:
    loaded = load(path)
    size = path.stat().st_size
    assert pinned() == size
    assert "pages of files" in str(cumem.stats())
    for _ in range(2):
        report = cumem.sleep()
        assert (report.copied_bytes, cumem.stats().host_used_bytes) == (0, 0)
        assert report.reload_bytes == sum(tensor.nbytes for tensor in TENSORS.values())
        assert pinned() == size
        cumem.wake_up()
        assert intact(loaded)
    loaded.clear()
    gc.collect()
    assert pinned() == 0
    assert "pages of files" not in str(cumem.stats())


def test_what_was_written_since_comes_back_as_written(path: Path) -> None:
    loaded = load(path)
    fill_pattern(loaded["odd"], 5)
    assert cumem.sleep().copied_bytes > 0
    cumem.wake_up()
    assert holds_pattern(loaded["odd"], 5)
    assert intact(loaded, "first", "last")


def test_a_file_that_is_gone_still_comes_back_and_one_that_has_changed_does_not(
    path: Path, tmp_path: Path
) -> None:
    loaded = load(path)
    cumem.sleep()
    path.unlink()
    cumem.wake_up()
    assert intact(loaded)
    other = write_file(tmp_path / "other.safetensors", TENSORS)
    second = cumem.load_file(other, tag="second", on_sleep="reload", pin_file=True)
    cumem.sleep(tags=["second"])
    with other.open("r+b") as file:
        file.seek(-3, 2)
        file.write(b"abc")
    with pytest.raises(cumem.CheckpointError, match=r"other\.safetensors.*changed"):
        cumem.wake_up()
    assert cumem.sleeping_tags() == {"second"}
    assert intact(loaded)
    second.clear()


@pytest.mark.needs("refusal to pin")
def test_a_refusal_to_pin_is_shown_or_an_error(path: Path, driver: DriverUnderTest) -> None:
    driver.emulator.refuse_pinning()
    loaded = load(path)
    assert intact(loaded)
    assert pinned() == 0
    configure(allow_pageable=False)
    before = state()
    with pytest.raises(cumem.DriverError, match="cuMemHostRegister"):
        cumem.load_file(path, tag="second", on_sleep="reload", pin_file=True)
    assert state() == before


def test_without_reload_nothing_would_read_the_pages_again(path: Path) -> None:
    with pytest.raises(ValueError, match='needs on_sleep="reload"'):
        cumem.load_file(path, pin_file=True)
    with pytest.raises(TypeError, match="pin_file must be a bool"):
        cumem.load_file(path, on_sleep="reload", pin_file=1)  # type: ignore[arg-type]
    assert cumem.stats().segment_bytes == 0


def sparse_shards(folder: Path, sizes: list[int]) -> Path:
    """A sharded checkpoint of zeros that takes no room, on a disk."""
    device = os.stat(folder).st_dev
    place = f" {os.major(device)}:{os.minor(device)} "
    mounts = Path("/proc/self/mountinfo").read_text().splitlines()
    if any(place in line and " - tmpfs " in line for line in mounts):
        pytest.skip("needs a folder on a disk")
    places = {}
    for number, size in enumerate(sizes):
        name = f"{number}.safetensors"
        tensor = {"dtype": "U8", "shape": [size], "data_offsets": [0, size]}
        header = json.dumps({name: tensor}).encode()
        with (folder / name).open("wb") as file:
            file.write(len(header).to_bytes(8, "little") + header)
            file.truncate(8 + len(header) + size)
        places[name] = name
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": places}))
    return folder


def test_files_whose_pages_find_no_room_together_are_refused_before_one_is_read(
    tmp_path: Path,
) -> None:
    with cumem.use_memory_pool("kept"):
        kept = make(10_000, 1)
    cumem.sleep()
    cumem.wake_up()
    before = cumem.stats()
    assert before.host_bytes > 0
    folder = sparse_shards(tmp_path, [_C.available_host_bytes() // 5 * 3] * 2)
    with pytest.raises(cumem.HostOutOfMemoryError, match=r"pages of a file.*Nothing was loaded"):
        load(folder)
    after = cumem.stats()
    assert after.pinned_file_bytes == after.host_bytes == 0, "what only saves time goes before"
    assert after.physical_bytes == before.physical_bytes
    assert after.segment_bytes == before.segment_bytes
    assert holds_pattern(kept, 1)
