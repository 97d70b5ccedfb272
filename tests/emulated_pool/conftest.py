"""The fixtures of every test of the emulated pool."""

from __future__ import annotations

import pytest
from fake_plugin import FakePlugin

from cumem._emulated_pool import EmulatedMemPool


@pytest.fixture
def plugin() -> FakePlugin:
    return FakePlugin()


@pytest.fixture
def pool(plugin: FakePlugin) -> EmulatedMemPool:
    return EmulatedMemPool(plugin.functions, 0)
