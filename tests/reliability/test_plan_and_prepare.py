"""Does a plan say what the sleep does, and does preparing take no more than that?"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from support import MIB, DriverUnderTest, holds_pattern, make, state, tag_stats

import cumem

CALLS: list[dict[str, Any]] = [
    {},
    {"level": 0},
    {"level": 2},
    {"tags": ["weights"]},
    {"tags": []},
    {"offload_tags": ["kv_cache"]},
    {"tags": ["weights", "draft"], "offload_tags": ["draft"]},
]


def build() -> list[torch.Tensor]:
    tensors = []
    for seed, tag in enumerate(("weights", "kv_cache", "draft")):
        with cumem.use_memory_pool(tag):
            tensors += [make(3 * MIB + seed, seed), make(700, seed)]
    cumem.keep(tensors[-1])
    with cumem.use_memory_pool("resident", on_sleep="keep"):
        tensors.append(make(100))
    return tensors


def host_bytes() -> int:
    return cumem.stats().host_bytes


@pytest.mark.parametrize("cycles", [0, 1, 2])
@pytest.mark.parametrize("call", CALLS, ids=str)
def test_a_plan_touches_nothing_and_predicts_the_report(call: dict[str, Any], cycles: int) -> None:
    tensors = build()
    for _ in range(cycles):
        cumem.sleep()
        cumem.wake_up()
    before = (state(), host_bytes(), {tag: cumem.epoch(tag) for tag in ("weights", "kv_cache")})
    plan = cumem.plan_sleep(**call)
    assert (state(), host_bytes(), {tag: cumem.epoch(tag) for tag in ("weights", "kv_cache")}) == (
        before
    )
    report = cumem.sleep(**call)
    assert plan.freed_bytes == report.freed_bytes
    assert plan.offloaded_bytes == report.offloaded_bytes
    assert plan.discarded_bytes == report.discarded_bytes
    assert (plan.tags, plan.devices) == (report.tags, report.devices)
    cumem.wake_up()
    del tensors


@pytest.mark.parametrize("retain", [True, False])
@pytest.mark.parametrize("cycles", [0, 1, 2])
def test_a_plan_says_how_much_host_memory_the_sleep_takes(cycles: int, retain: bool) -> None:
    cumem.configure(cumem.Options(retain_backup=retain))
    with cumem.use_memory_pool("weights"):
        tensor = make(5 * MIB)
    for _ in range(cycles):
        cumem.sleep()
        cumem.wake_up()
    plan, before = cumem.plan_sleep(), host_bytes()
    cumem.sleep()
    assert host_bytes() - before == pytest.approx(plan.host_bytes, abs=8192)
    cumem.wake_up()
    del tensor


def test_a_plan_of_what_sleeps_is_empty() -> None:
    tensors = build()
    cumem.sleep()
    assert cumem.plan_sleep() == cumem.SleepPlan()
    assert "nothing" in str(cumem.plan_sleep())
    cumem.wake_up()
    del tensors


def test_a_plan_prints_as_one_line_that_names_the_tags() -> None:
    tensors = build()
    text = str(cumem.plan_sleep())
    assert "\n" not in text
    assert all(tag in text for tag in ("weights", "kv_cache", "draft"))
    del tensors


@pytest.mark.parametrize(
    ("call", "error"),
    [
        ({"tags": ["wieghts"]}, ValueError),
        ({"level": 3}, ValueError),
        ({"level": 2, "offload_tags": []}, ValueError),
        ({"tags": "weights"}, TypeError),
    ],
    ids=str,
)
def test_a_plan_refuses_what_a_sleep_refuses(call: dict[str, Any], error: type) -> None:
    tensors = build()
    for function in (cumem.plan_sleep, cumem.sleep):
        with pytest.raises(error):
            function(**call)
    del tensors


def test_a_plan_may_be_made_inside_a_scope() -> None:
    with cumem.use_memory_pool("weights"):
        tensor = make(100)
        assert cumem.plan_sleep().tags == {"weights"}
    del tensor


# prepare()


def test_nothing_is_prepared_or_planned_for_what_sleeps_to_disk(tmp_path: Path) -> None:
    cumem.configure(cumem.Options(disk_dir=str(tmp_path)))
    with cumem.use_memory_pool("weights", on_sleep="disk"):
        tensor = make(5 * MIB)
    assert cumem.prepare(background=False).bytes == 0
    assert host_bytes() == 0
    cumem.sleep()
    cumem.wake_up()
    cumem.release_host_memory()
    with cumem.use_memory_pool("draft"):
        other = make(3 * MIB)
    assert cumem.plan_sleep().host_bytes == pytest.approx(3 * MIB, abs=8192)
    del tensor, other


def test_a_prepared_sleep_takes_no_more_host_memory() -> None:
    tensors = build()
    wanted = cumem.plan_sleep().offloaded_bytes
    preparation = cumem.prepare(background=False)
    assert preparation.done()
    assert preparation.bytes == wanted
    held = host_bytes()
    assert wanted <= held <= 1.05 * wanted + 8192
    assert cumem.plan_sleep().host_bytes == 0
    assert cumem.sleep().host_bytes == held
    cumem.wake_up()
    assert holds_pattern(tensors[0], 0)


@pytest.mark.parametrize("cycles", [1, 2])
def test_preparing_again_takes_nothing_while_the_backups_are_kept(cycles: int) -> None:
    """vllm#16663, vllm#55206, TMS#90: one backup in host memory, never two."""
    tensors = build()
    for _ in range(cycles):
        cumem.sleep()
        cumem.wake_up()
    held = host_bytes()
    cumem.prepare(background=False)
    assert host_bytes() == held
    del tensors


def test_preparing_in_the_background_goes_on_beside_a_sleep() -> None:
    tensors = build()
    preparation = cumem.prepare(bytes=64 * MIB)
    cumem.sleep()
    preparation.wait()
    preparation.wait()
    assert preparation.done()
    cumem.wake_up()
    assert all(holds_pattern(tensors[at], at // 2) for at in (0, 1, 4, 5))


def test_preparing_changes_no_memory_of_the_device(driver: DriverUnderTest) -> None:
    tensors = build()
    used, asleep = driver.used_bytes(), cumem.sleeping_tags()
    cumem.prepare(["weights"], background=False)
    assert (driver.used_bytes(), cumem.sleeping_tags()) == (used, asleep)
    assert tag_stats("weights").backup_bytes == 0
    del tensors


def test_preparing_more_than_the_limit_is_said_and_takes_nothing() -> None:
    cumem.configure(cumem.Options(host_limit_bytes=4 * MIB))
    preparation = cumem.prepare(bytes=5 * MIB)
    with pytest.raises(cumem.HostOutOfMemoryError, match="prepare"):
        preparation.wait()
    assert host_bytes() == 0
    with pytest.raises(cumem.HostOutOfMemoryError):
        cumem.prepare(bytes=5 * MIB, background=False)


def test_preparing_nothing_is_no_error() -> None:
    assert cumem.prepare(background=False).bytes == 0
    assert cumem.prepare(bytes=0, background=False).bytes == 0
    assert host_bytes() == 0


@pytest.mark.parametrize(
    ("call", "error"),
    [
        ({"bytes": -1}, ValueError),
        ({"bytes": True}, TypeError),
        ({"bytes": 1.5}, TypeError),
        ({"tags": ["wieghts"]}, ValueError),
        ({"tags": "weights"}, TypeError),
    ],
    ids=str,
)
def test_a_wrong_argument_of_prepare_is_refused(call: dict[str, Any], error: type) -> None:
    tensors = build()
    with pytest.raises(error):
        cumem.prepare(**call)
    assert host_bytes() == 0
    del tensors
