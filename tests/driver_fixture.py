"""The driver of one test, and what must hold when the test is over."""

from __future__ import annotations

import gc
import warnings
from collections.abc import Iterator

import pytest
import torch
from support import BODY_PASSED, MIB, DriverUnderTest, chosen_driver

import cumem
from cumem.testing import EmulatedDriver, emulated_driver


@pytest.fixture(scope="session", autouse=True)
def short_collections() -> Iterator[None]:
    """What was imported is not looked at again by each collection of the garbage collector."""
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()


@pytest.fixture(scope="session", autouse=True)
def no_look_at_sleeping_memory() -> Iterator[None]:
    """A failed test is shown with its tensors; those that sleep cannot be read."""
    shown = torch.Tensor.__repr__

    def safely(tensor: torch.Tensor, **options: object) -> str:
        return shown(tensor, **options) if cumem.is_mapped(tensor) else "tensor(asleep)"

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.Tensor, "__repr__", safely)
        yield


@pytest.fixture(autouse=True)
def driver(request: pytest.FixtureRequest) -> Iterator[DriverUnderTest]:
    """The driver under test; on the emulator, a machine of the test's own."""
    if chosen_driver(request.config) == "cuda":
        yield from _on_cuda(request)
    else:
        yield from _on_emulator(request)


@pytest.fixture
def emulator(driver: DriverUnderTest) -> EmulatedDriver:
    return driver.emulator


def _on_emulator(request: pytest.FixtureRequest) -> Iterator[DriverUnderTest]:
    marker = request.node.get_closest_marker("machine")
    machine = {"capacity_bytes": 512 * MIB, **(marker.kwargs if marker else {})}
    with emulated_driver(**machine) as emulator:
        start = emulator.ledger()
        driver = DriverUnderTest(emulator)
        with _checked(request, driver):
            yield driver
        if request.node.stash.get(BODY_PASSED, False) and not driver.tolerates_refusals:
            assert _memory_of(emulator.ledger()) == _memory_of(start)


def _on_cuda(request: pytest.FixtureRequest) -> Iterator[DriverUnderTest]:
    for marker in request.node.iter_markers("needs"):
        pytest.skip(f"the real driver has no {marker.args[0]}")
    marker = request.node.get_closest_marker("machine")
    devices = marker.kwargs.get("devices", 1) if marker else 1
    if torch.cuda.device_count() < devices:
        pytest.skip(f"needs {devices} GPUs")
    driver = DriverUnderTest(None)
    with _checked(request, driver):
        yield driver


class _checked:  # noqa: N801 - reads as a function
    """Cleans up after a test; when the test passed, also proves that nothing is left."""

    def __init__(self, request: pytest.FixtureRequest, driver: DriverUnderTest) -> None:
        self._request = request
        self._driver = driver

    def __enter__(self) -> None:
        cumem.configure(cumem.Options())

    def __exit__(self, *error: object) -> None:
        passed = self._request.node.stash.get(BODY_PASSED, False)
        try:
            if passed:
                cumem.check()
        finally:
            gc.collect()
            cumem.configure(cumem.Options())
            with warnings.catch_warnings():
                if self._driver.tolerates_refusals or not passed:
                    warnings.simplefilter("ignore")
                self._clean_up()
        if passed and not self._driver.tolerates_refusals:
            _nothing_is_left()

    def _clean_up(self) -> None:
        if self._driver.emulated:
            self._driver.emulator.clear()
        cumem.wake_up()
        cumem.trim()
        cumem.release_host_memory()


def _nothing_is_left() -> None:
    cumem.check()
    stats = cumem.stats()
    assert cumem.sleeping_tags() == frozenset()
    left = {entry.tag: entry.segment_bytes for entry in stats.tags if entry.segments}
    assert left == {}, "a tensor or a scope of the test is still alive"
    assert stats.handles_created == stats.handles_released
    assert (stats.physical_bytes, stats.reserved_addresses) == (0, 0)
    assert (stats.host_bytes, stats.host_used_bytes) == (0, 0)
    assert (stats.waiting_frees, stats.quarantined_segments) == (0, 0)
    assert (stats.refused_calls, stats.unknown_frees) == (0, 0)


def _memory_of(ledger: dict[str, int]) -> dict[str, int]:
    """What must be as it was: all but what a device makes once and keeps."""
    kept = ("streams", "events", "modules", "host_registrations", "registered_bytes")
    return {kind: count for kind, count in ledger.items() if kind not in kept}
