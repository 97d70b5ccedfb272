"""Is the public face what it is documented to be?"""

from __future__ import annotations

import dataclasses
import inspect
import re
from importlib import resources
from typing import Any

import pytest

import cumem

CONTRACT = {
    *("use_memory_pool", "graph_pool", "Pool", "OnSleep", "Options", "configure"),
    *("sleep", "wake_up", "is_sleeping", "sleeping_tags", "is_mapped", "tag_of", "epoch"),
    *("keep", "covered", "uncovered", "stats", "check", "trim", "default_device"),
    *("SleepReport", "WakeReport", "Stats"),
    *("CumemError", "DeviceOutOfMemoryError", "HostOutOfMemoryError", "AsleepError"),
    *("BusyError", "DriverError", "CheckpointError"),
}
SIGNATURES = {
    "use_memory_pool": "(tag='default', *, on_sleep=None, device=None)",
    "graph_pool": "(tag='cuda_graph', *, on_sleep=None, device=None)",
    "sleep": "(level=1, *, tags=None, offload_tags=None, verify=False)",
    "wake_up": "(tags=None, *, fill=None, wait=True, verify=False)",
    "is_sleeping": "()",
    "sleeping_tags": "()",
    "is_mapped": "(tensor)",
    "tag_of": "(tensor)",
    "epoch": "(tag)",
    "keep": "(obj)",
    "covered": "(module, tag='weights')",
    "uncovered": "(module, tag='weights')",
    "stats": "()",
    "check": "()",
    "trim": "(tag=None)",
    "default_device": "()",
    "release_host_memory": "()",
    "adopt": "(module, tag='weights', *, on_sleep=None)",
    "save_snapshot": "(path, module, *, extra=None)",
    "restore_snapshot": "(path, module, *, extra=None, verify=True)",
    "load_into": "(module, path_or_dir, *, name_map=None, strict=True)",
}
PUBLIC = sorted(name for name in cumem.__all__ if name != "__version__")
FUNCTIONS = [name for name in PUBLIC if inspect.isfunction(getattr(cumem, name))]
CLASSES = [name for name in PUBLIC if inspect.isclass(getattr(cumem, name))]
RAISE = [
    *("use_memory_pool", "sleep", "wake_up", "epoch", "keep", "covered", "uncovered"),
    *("stats", "check", "trim", "configure", "default_device"),
]


def bare(signature: inspect.Signature) -> str:
    """A signature without its annotations."""
    plain = [p.replace(annotation=p.empty) for p in signature.parameters.values()]
    return str(inspect.Signature(plain))


def test_the_contract_is_public() -> None:
    assert set(cumem.__all__) >= CONTRACT


def test_public_names_exist_once_and_in_order() -> None:
    assert len(cumem.__all__) == len(set(cumem.__all__))
    assert list(cumem.__all__) == sorted(cumem.__all__)
    assert all(hasattr(cumem, name) for name in cumem.__all__)


def test_nothing_else_is_public() -> None:
    names = {name for name in vars(cumem) if not name.startswith("_")}
    modules = {name for name in names if inspect.ismodule(getattr(cumem, name))}
    assert names - modules <= set(cumem.__all__)


def test_the_version_is_a_version() -> None:
    assert all(part.isdigit() for part in cumem.__version__.split(".")[:2])


@pytest.mark.parametrize("name", SIGNATURES)
def test_a_function_takes_what_is_documented(name: str) -> None:
    assert bare(inspect.signature(getattr(cumem, name))) == SIGNATURES[name]


@pytest.mark.parametrize("name", FUNCTIONS)
def test_functions_are_typed_throughout(name: str) -> None:
    signature = inspect.signature(getattr(cumem, name))
    assert signature.return_annotation is not signature.empty
    assert all(p.annotation is not p.empty for p in signature.parameters.values())


@pytest.mark.parametrize("name", [name for name in PUBLIC if not name.endswith("Error")])
def test_true_or_false_is_given_by_keyword_only(name: str) -> None:
    for parameter in inspect.signature(getattr(cumem, name)).parameters.values():
        boolean = isinstance(parameter.default, bool) or str(parameter.annotation) == "bool"
        assert not boolean or parameter.kind is parameter.KEYWORD_ONLY, parameter.name


@pytest.mark.parametrize("name", [*FUNCTIONS, *CLASSES])
def test_everything_public_is_documented(name: str) -> None:
    documented = getattr(cumem, name).__doc__
    assert documented
    assert documented.strip().splitlines()[0].endswith((".", "?", ":"))


@pytest.mark.parametrize("name", RAISE)
def test_a_function_says_what_it_raises(name: str) -> None:
    assert "Raises:" in inspect.getdoc(getattr(cumem, name))


@pytest.mark.parametrize("name", FUNCTIONS)
def test_a_function_documents_its_arguments(name: str) -> None:
    documented = inspect.getdoc(getattr(cumem, name))
    parameters = list(inspect.signature(getattr(cumem, name)).parameters)
    if "Args:" not in documented:
        elsewhere = re.search(r"Args and errors are those of|with these arguments", documented)
        assert len(parameters) <= 2 or elsewhere
        return
    assert all(f"    {parameter}:" in documented for parameter in parameters)


@pytest.mark.parametrize(
    ("name", "members"),
    [
        (
            "Pool",
            {"tag", "device", "on_sleep", "segment_bytes", "live_bytes", "segments", "id"}
            | {"captured_bytes"},
        ),
        (
            "SleepReport",
            {"freed_bytes", "offloaded_bytes", "discarded_bytes", "copied_bytes", "skipped_bytes"}
            | {"host_bytes", "seconds", "tags", "devices", "phases"},
        ),
        (
            "WakeReport",
            {"mapped_bytes", "restored_bytes", "seconds", "tags", "undefined", "devices", "phases"},
        ),
    ],
)
def test_a_class_has_the_members_of_the_contract(name: str, members: set[str]) -> None:
    kind = getattr(cumem, name)
    fields = (
        {field.name for field in dataclasses.fields(kind)}
        if dataclasses.is_dataclass(kind)
        else set()
    )
    assert all(
        hasattr(kind, member) or member in fields or member in kind.__doc__ for member in members
    )


@pytest.mark.parametrize("name", ["Options", "SleepReport", "WakeReport", "Stats", "TagStats"])
def test_a_value_is_frozen(name: str) -> None:
    kind: Any = getattr(cumem, name)
    assert dataclasses.is_dataclass(kind)
    assert kind.__dataclass_params__.frozen


def test_empty_reports_print_as_one_line() -> None:
    for report in (cumem.SleepReport(), cumem.WakeReport()):
        assert "nothing" in str(report)
        assert "\n" not in str(report)


def test_policies_are_their_lower_case_names() -> None:
    policies = {policy.name: policy.value for policy in cumem.OnSleep}
    assert {name.lower(): name.lower() for name in policies} == {
        name.lower(): value for name, value in policies.items()
    }
    assert {"offload", "discard", "keep"} <= set(policies.values())


def test_options_have_the_documented_defaults() -> None:
    options = cumem.Options()
    assert options.chunk_bytes == 1 << 30
    assert (options.host_limit_bytes, options.host_threads) == (None, 0)
    assert options.pin_backups
    assert options.allow_pageable
    assert options.retain_backup
    assert options.warn_empty_scope


def test_the_package_is_marked_as_typed() -> None:
    assert (resources.files("cumem") / "py.typed").is_file()
