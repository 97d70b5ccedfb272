"""The fixtures of every reliability test."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from driver_fixture import (  # noqa: F401 - pytest finds fixtures by name
    driver,
    emulator,
    no_look_at_sleeping_memory,
    short_collections,
)
from hooks_on_trial import Hooks


@pytest.fixture
def hooks() -> Iterator[Hooks]:
    """Hooks that are taken back when the test is over."""
    registered = Hooks()
    yield registered
    registered.remove()
