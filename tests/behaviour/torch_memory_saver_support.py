"""What do tests of torch_memory_saver's drop-in work with? An object of their own."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

import cumem
from cumem.compat.torch_memory_saver import TorchMemorySaver


@pytest.fixture(name="saver")
def saver_fixture() -> Iterator[TorchMemorySaver]:
    yield TorchMemorySaver()
    cumem.configure(cumem.Options())
