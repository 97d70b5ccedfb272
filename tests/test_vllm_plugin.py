"""Does vLLM find cumem's allocator where it looks, and only when it is switched on?"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any, ClassVar

import pytest
from support import MIB, holds_pattern, make

import cumem
from cumem.compat import vllm_plugin
from cumem.compat.vllm import CuMemAllocator
from cumem.testing import emulated_driver

ROOT = Path(__file__).parent.parent


class TheirAllocator:
    """Stands for the allocator of vLLM."""

    instance: ClassVar[object | None] = None


class TheirBackend:
    """Stands for the base class of vLLM's backends."""

    def __init__(self) -> None:
        self._state = "RUNNING"

    def state(self) -> str:
        return self._state


class Factory:
    """Stands for vLLM's registry of backends."""

    registered: ClassVar[dict[str, tuple[str, str]]] = {}

    @classmethod
    def register_backend(cls, name: str, module: str, kind: str) -> None:
        assert name not in cls.registered, "vLLM refuses a name that is taken"
        cls.registered[name] = (module, kind)


@pytest.fixture
def vllm(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, Any]]:
    """Modules in the place of vLLM's own, with what cumem touches of them."""
    names = ("vllm", "vllm.device_allocator", "vllm.device_allocator.cumem")
    modules: dict[str, Any] = {name: ModuleType(name) for name in names}
    modules[names[2]].CuMemAllocator = TheirAllocator
    modules[names[2]].cumem_available = False
    backends: Any = ModuleType("vllm.device_allocator.sleep_mode_backend")
    backends.SleepModeBackend = TheirBackend
    backends.SleepModeBackendFactory = type("Factory", (Factory,), {"registered": {}})
    modules["vllm.device_allocator.sleep_mode_backend"] = backends
    for name, module in modules.items():
        monkeypatch.setitem(sys.modules, name, module)
    yield modules
    CuMemAllocator.instance = None
    sys.modules.pop("cumem.compat.vllm_backend", None)


def test_nothing_happens_unless_it_is_switched_on(
    vllm: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("CUMEM_VLLM", raising=False)
    vllm_plugin.register()
    monkeypatch.setenv("CUMEM_VLLM", "0")
    vllm_plugin.register()
    assert vllm["vllm.device_allocator.cumem"].CuMemAllocator is TheirAllocator
    assert CuMemAllocator.instance is None


def test_an_unknown_setting_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUMEM_VLLM", "yes")
    with pytest.raises(ValueError, match="CUMEM_VLLM 'yes'; choices"):
        vllm_plugin.register()


def test_the_entry_point_is_the_function() -> None:
    tomllib = pytest.importorskip("tomllib", reason="needs Python 3.11")
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    target = project["entry-points"]["vllm.general_plugins"]["cumem"]
    module, name = target.split(":")
    assert getattr(import_module(module), name) is vllm_plugin.register


def test_switched_on_it_takes_the_place_of_vllms(
    vllm: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUMEM_VLLM", "1")
    vllm_plugin.register()
    vllm_plugin.register()
    module = vllm["vllm.device_allocator.cumem"]
    assert module.CuMemAllocator is CuMemAllocator
    assert module.cumem_available
    factory = vllm["vllm.device_allocator.sleep_mode_backend"].SleepModeBackendFactory
    assert set(factory.registered) == {"cumem-vmm"}


def test_a_vllm_without_a_registry_is_served_too(
    vllm: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUMEM_VLLM", "1")
    monkeypatch.setitem(sys.modules, "vllm.device_allocator.sleep_mode_backend", None)
    vllm_plugin.register()
    assert vllm["vllm.device_allocator.cumem"].CuMemAllocator is CuMemAllocator


def test_an_allocator_in_use_is_not_replaced(
    vllm: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUMEM_VLLM", "1")
    monkeypatch.setattr(TheirAllocator, "instance", object())
    with pytest.raises(RuntimeError, match="in use in this process"):
        vllm_plugin.register()
    assert vllm["vllm.device_allocator.cumem"].CuMemAllocator is TheirAllocator


def test_hooks_of_vllm_are_called(vllm: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    heard: list[object] = []
    package = vllm["vllm.device_allocator"]
    package.run_before_unmap_hooks = lambda memory, tags: heard.append(sorted(tags))
    package.run_after_map_hooks = lambda memory: heard.append([m.is_asleep for m in memory])
    monkeypatch.setenv("CUMEM_VLLM", "1")
    vllm_plugin.register()
    with emulated_driver():
        allocator = CuMemAllocator.get_instance()
        with allocator.use_memory_pool("kv_cache"):
            cache = make(MIB)
        allocator.sleep(())
        allocator.wake_up()
        assert heard == [["kv_cache"], [False]]
        del cache


def test_the_backend_sleeps_by_levels_and_keeps_its_state_true(
    vllm: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUMEM_VLLM", "1")
    vllm_plugin.register()
    factory = vllm["vllm.device_allocator.sleep_mode_backend"].SleepModeBackendFactory
    module, kind = factory.registered[vllm_plugin.BACKEND]
    backend = getattr(import_module(module), kind)()
    with emulated_driver() as emulator:
        with CuMemAllocator.get_instance().use_memory_pool("weights"):
            weights = make(2 * MIB, 1)
        backend.suspend(level=1)
        assert backend.state() == "SUSPENDED"
        emulator.fail("cuMemCreate")
        emulator.fail("cuMemMap")
        with pytest.raises(cumem.CumemError):
            backend.resume()
        assert backend.state() == "SUSPENDED"
        emulator.clear()
        backend.resume(["weights"])
        assert backend.state() == "RUNNING"
        assert holds_pattern(weights, 1)
        backend.suspend(level=2)
        backend.resume()
        backend.discard("weights")
        assert not cumem.is_mapped(weights)
        assert backend.preserves_communicators()
        assert backend.preserves_compiled_artifacts()
        backend.resume()
        del weights
