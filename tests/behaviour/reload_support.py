"""What do tests of reload work with? Tensors in a file, and memory that was loaded from it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from checkpoints import host_tensor, write_file
from support import MIB, DriverUnderTest, same_bytes

import cumem

KIB = 1 << 10
PIECE = 2 * MIB  # what one digest stands for


@pytest.fixture(autouse=True)
def small_steps() -> None:
    configure()


def configure(**settings: object) -> None:
    cumem.configure(
        cumem.Options(
            load_buffer_bytes=256 * KIB,
            load_ring_bytes=MIB,
            load_threads=2,
            **settings,  # type: ignore[arg-type]
        )
    )


TENSORS = {
    "first": host_tensor(torch.uint8, (3 * MIB + 5,), 1),
    "odd": host_tensor(torch.bfloat16, (33, 7), 2),
    "last": host_tensor(torch.float32, (300, 1000), 3),
}


@pytest.fixture(name="path")
def path_fixture(tmp_path: Path) -> Path:
    return write_file(tmp_path / "model.safetensors", TENSORS)


@pytest.fixture(name="loaded")
def loaded_fixture(path: Path) -> Iterator[dict[str, torch.Tensor]]:
    tensors = cumem.load_file(path, on_sleep="reload")
    yield tensors
    tensors.clear()


def intact(loaded: dict[str, torch.Tensor], *names: str) -> bool:
    return all(same_bytes(loaded[name], TENSORS[name]) for name in names or TENSORS)


def has_digests() -> bool:
    """Can the device compute digests? (A machine may lack what compiles the kernel.)"""
    with cumem.use_memory_pool("probe"):
        probe = torch.ones(10, device=cumem.default_device())
    report = cumem.sleep(tags=["probe"])
    cumem.wake_up(["probe"])
    del probe
    cumem.trim("probe")
    return report.clean_check == "digest"


@pytest.fixture(autouse=True)
def digests_are_there(small_steps: None, driver: DriverUnderTest) -> None:
    if not has_digests():
        pytest.skip("the device computes no digests")
