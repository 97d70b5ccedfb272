"""Which error is which, and what do its messages say?"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
from support import MIB, holds_pattern, make

import cumem
from cumem import _C, _registry, _runtime
from cumem.errors import from_status, translated
from cumem.testing import emulated_driver

ERRORS = [
    (cumem.CumemError, RuntimeError),
    (cumem.DeviceOutOfMemoryError, torch.OutOfMemoryError),
    (cumem.DeviceOutOfMemoryError, cumem.CumemError),
    (cumem.HostOutOfMemoryError, MemoryError),
    (cumem.HostOutOfMemoryError, cumem.CumemError),
    (cumem.AsleepError, cumem.CumemError),
    (cumem.BusyError, cumem.CumemError),
    (cumem.DriverError, cumem.CumemError),
    (cumem.CheckpointError, ValueError),
    (cumem.CheckpointError, cumem.CumemError),
]


@pytest.mark.parametrize(("error", "base"), ERRORS)
def test_an_error_can_be_caught_as_its_bases(error: type, base: type) -> None:
    with pytest.raises(base, match="text"):
        raise error("text")


def test_errors_of_one_kind_are_not_of_another() -> None:
    kinds = {error for error, _ in ERRORS} - {cumem.CumemError}
    for one in kinds:
        assert not any(issubclass(one, other) for other in kinds - {one})


# What the core reports


def status(fault: str, **details: object) -> _C.StatusError:
    error = _C.StatusError("cuMemCreate")
    known = {"code": 2, "code_name": "CUDA_ERROR_X", "call": "cuMemCreate", "bytes": 3 * MIB}
    known |= {"device": 1, "free_bytes": MIB, "address": 0, "fault": fault}
    for name, value in {**known, **details}.items():
        setattr(error, name, value)
    return error


@pytest.mark.parametrize(
    ("fault", "kind"),
    [
        ("device_memory", cumem.DeviceOutOfMemoryError),
        ("host_memory", cumem.HostOutOfMemoryError),
        ("capture", cumem.BusyError),
        ("dead_context", cumem.DriverError),
        ("forked", cumem.DriverError),
        ("deinitialized", cumem.DriverError),
        ("unsupported", cumem.DriverError),
        ("invalid", cumem.DriverError),
        ("integrity", cumem.IntegrityError),
        ("driver", cumem.DriverError),
    ],
)
def test_each_fault_of_the_core_has_its_error(fault: str, kind: type[cumem.CumemError]) -> None:
    error = from_status(status(fault), "sleep('weights')", "Nothing was changed.")
    assert type(error) is kind
    assert str(error).startswith("sleep('weights'): ")
    assert "\n" not in str(error)


@pytest.mark.parametrize("fault", ["device_memory", "host_memory"])
def test_a_shortage_says_what_how_much_where_and_what_is_left(fault: str) -> None:
    message = str(from_status(status(fault), "wake_up('kv_cache')", "Nothing was woken."))
    where = ":1" if fault == "device_memory" else "host memory"
    for part in ("cuMemCreate", "3.0 MiB", where, "CUDA_ERROR_X", "1.0 MiB free"):
        assert part in message
    assert message.endswith("Nothing was woken.")


def test_a_dead_context_and_a_fork_say_what_to_do() -> None:
    assert "restart the process" in str(from_status(status("dead_context"), "sleep()", ""))
    assert "spawn" in str(from_status(status("forked"), "sleep()", ""))


def test_a_changed_file_is_to_be_put_back_unless_the_caller_says_otherwise() -> None:
    error = status("source", path="model.safetensors", error=0)
    assert "Put the file back" in str(from_status(error, "wake_up()", "Nothing was woken."))
    with (
        pytest.raises(cumem.CheckpointError, match=r"model\.safetensors: cuMemCreate\. Nothing\.$"),
        translated("load_file('x')", "Nothing was read.", changed="Nothing."),
    ):
        raise error
    unreadable = from_status(status("source", path="m", error=5), "load_file('x')", "Left.")
    assert str(unreadable).endswith("Left.")


def test_the_cause_is_kept() -> None:
    cause = status("driver")
    with pytest.raises(cumem.DriverError) as caught, translated("sleep()", "Nothing was changed."):
        raise cause
    assert caught.value.__cause__ is cause


def test_other_errors_pass_untouched() -> None:
    with pytest.raises(KeyError), translated("sleep()", ""):
        raise KeyError


def test_an_unknown_allocation_is_reported_by_its_status() -> None:
    with emulated_driver(64 * MIB):
        allocator = _runtime.current().allocator
        with pytest.raises(_C.StatusError) as caught:
            allocator.malloc(65 * MIB, 0, 0, _C.Owner("weights", "offload"))
    error = caught.value
    assert (error.fault, error.call, error.device) == ("device_memory", "cuMemCreate", 0)
    assert error.code_name == "CUDA_ERROR_OUT_OF_MEMORY"
    assert error.bytes >= 64 * MIB


# Before anything was started


@pytest.fixture
def nothing_started() -> Iterator[None]:
    """As in a fresh process that has imported cumem and nothing more."""
    runtime, registry = _runtime.replace(None), _registry.replace(_registry.State())
    yield
    assert _runtime.if_started() is None
    _runtime.replace(runtime)
    _registry.replace(registry)


@pytest.mark.parametrize(
    "call",
    [
        lambda: cumem.sleep(level=7),
        lambda: cumem.sleep(tags=["weights"]),
        lambda: cumem.sleep(offload_tags=["weights"]),
        lambda: cumem.sleep(level=2, offload_tags=[]),
        lambda: cumem.wake_up(["weights"]),
        lambda: cumem.wake_up(fill="ones"),
        lambda: cumem.epoch("weights"),
        lambda: cumem.trim("weights"),
        lambda: cumem.covered(torch.nn.Module()),
        lambda: cumem.uncovered(torch.nn.Module()),
        lambda: cumem.use_memory_pool(""),
        lambda: cumem.use_memory_pool(on_sleep="drop"),
    ],
)
def test_bad_values_are_refused_before_there_is_a_driver(
    nothing_started: None, call: Callable[[], object]
) -> None:
    with pytest.raises(ValueError):
        call()


@pytest.mark.parametrize(
    "call",
    [
        lambda: cumem.sleep(level="1"),
        lambda: cumem.sleep(tags="weights"),
        lambda: cumem.sleep(tags=[5]),
        lambda: cumem.wake_up("weights"),
        lambda: cumem.wake_up(fill=0),
        lambda: cumem.epoch(5),
        lambda: cumem.trim(5),
        lambda: cumem.tag_of("weights"),
        lambda: cumem.is_mapped("weights"),
        lambda: cumem.covered("weights"),
        lambda: cumem.keep(5),
        lambda: cumem.configure(5),
        lambda: cumem.use_memory_pool(5),
        lambda: cumem.use_memory_pool(on_sleep=5),
    ],
)
def test_wrong_types_are_refused_before_there_is_a_driver(
    nothing_started: None, call: Callable[[], object]
) -> None:
    with pytest.raises(TypeError):
        call()


def test_questions_need_no_driver(nothing_started: None) -> None:
    tensor = torch.ones(3)
    assert cumem.is_mapped(tensor)
    assert cumem.tag_of(tensor) is None
    assert not cumem.is_sleeping()
    assert cumem.sleeping_tags() == frozenset()
    assert cumem.stats().tags == ()
    assert str(cumem.stats())
    cumem.check()
    assert cumem.keep(tensor) is tensor
    assert (cumem.trim(), cumem.release_host_memory()) == (0, 0)
    assert cumem.sleep().tags == frozenset()
    assert cumem.wake_up().tags == frozenset()


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without a GPU")
def test_no_gpu_and_no_emulator_asked_for_is_told(
    nothing_started: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("CUMEM_DRIVER", raising=False)
    scopes = (cumem.use_memory_pool(), cumem.graph_pool())  # making one starts no driver
    for call in (cumem.default_device, *(scope.__enter__ for scope in scopes)):
        with pytest.raises(cumem.DriverError, match="CUMEM_DRIVER=emulated"):
            call()


def test_an_unknown_driver_is_told(nothing_started: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUMEM_DRIVER", "vulkan")
    with pytest.raises(ValueError, match="'vulkan'; choices: 'cuda', 'emulated'"):
        cumem.default_device()


# The emulated machine


@pytest.mark.parametrize(
    "machine", [{"capacity_bytes": -1}, {"devices": 0}, {"devices": 65}, {"capacity_bytes": 100}]
)
def test_a_machine_that_cannot_be_is_refused(machine: dict[str, int]) -> None:
    before = _runtime.if_started()
    with pytest.raises(ValueError, match="machine"), emulated_driver(**machine):
        pass
    assert _runtime.if_started() is before


def test_steering_refuses_unknown_calls_and_codes() -> None:
    with emulated_driver(64 * MIB) as emulator:
        for arguments in (("cuMemNothing",), ("cuMemCreate", 0), ("cuMemCreate", 1, "CUDA_ERROR")):
            with pytest.raises(ValueError):
                emulator.fail(*arguments)
        with pytest.raises(ValueError):
            emulator.calls("cuMemNothing")
        with pytest.raises(ValueError):
            emulator.new_stream(device=7)


def test_tensors_outlive_their_machine() -> None:
    with emulated_driver(64 * MIB) as emulator, cumem.use_memory_pool("weights"):
        tensor = make(1000, 1)
    assert holds_pattern(tensor, 1)
    assert emulator.used_bytes() == 2 * MIB
    del tensor
    with emulated_driver(64 * MIB):  # gives back what earlier machines left
        cumem.trim()
