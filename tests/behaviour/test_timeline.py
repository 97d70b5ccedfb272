"""Does a timeline record what happened, at the moment it happened?"""

from __future__ import annotations

import gc
import json
from pathlib import Path

import pytest
import torch
from support import MIB, DriverUnderTest, make

import cumem
from cumem import hooks


def test_marks_tell_live_reserved_tracked_and_device_apart(driver: DriverUnderTest) -> None:
    outside = torch.ones(3 * MIB, dtype=torch.uint8, device=driver.device)
    with cumem.Timeline() as timeline, cumem.use_memory_pool("weights"):
        before = timeline.mark("before")
        weights = make(30 * MIB)
        after = timeline.mark("after")
    assert [mark.label for mark in timeline.marks] == ["before", "after"]
    assert (before.tracked_bytes, before.segments, before.tags) == (0, 0, ())
    assert after.live_bytes - before.live_bytes == 30 * MIB
    assert after.reserved_bytes - before.reserved_bytes == 30 * MIB
    assert after.device_used_bytes - before.device_used_bytes == 30 * MIB
    assert (after.tracked_bytes, after.mapped_bytes, after.segments) == (30 * MIB, 30 * MIB, 1)
    assert after.tags == (cumem.TagMark("weights", 1, 30 * MIB, 30 * MIB, 30 * MIB),)
    assert 0 <= before.seconds <= after.seconds
    assert after.rss_bytes > 0
    del weights, outside


def test_sleeps_and_wakes_record_themselves_when_they_are_done(driver: DriverUnderTest) -> None:
    with cumem.use_memory_pool("weights"):
        weights = make(20 * MIB)
    with cumem.use_memory_pool("kv_cache"):
        cache = make(32 * MIB)
    with cumem.Timeline() as timeline:
        start = timeline.mark("start")
        cumem.sleep()
        cumem.wake_up(["weights"])
        cumem.wake_up()
    asleep, half, awake = timeline.marks[1:]
    assert [(mark.event, mark.label) for mark in timeline.marks] == [
        ("mark", "start"),
        ("sleep", "asleep: kv_cache, weights"),
        ("wake", "awake: weights"),
        ("wake", "awake: kv_cache"),
    ]
    assert [mark.mapped_bytes for mark in (start, asleep, half, awake)] == [
        52 * MIB,
        0,
        20 * MIB,
        52 * MIB,
    ]
    assert {mark.tracked_bytes for mark in timeline.marks} == {52 * MIB}
    assert start.device_used_bytes - asleep.device_used_bytes == 52 * MIB
    assert (start.backup_bytes, asleep.backup_bytes) == (0, 20 * MIB)
    del weights, cache


def test_switches_and_asynchronous_wakes_are_events_too() -> None:
    with cumem.use_memory_pool("a"):
        first = make(4 * MIB)
    with cumem.use_memory_pool("b"):
        second = make(4 * MIB)
    cumem.sleep(tags=["b"])
    with cumem.Timeline() as timeline:
        cumem.switch(sleep_tags=["a"], wake_tags=["b"])
        cumem.wake_up(wait=False).wait()
    assert [mark.label for mark in timeline.marks] == ["asleep: a", "awake: b", "awake: a"]
    del first, second


def test_a_repeated_sleep_is_no_event() -> None:
    with cumem.use_memory_pool("weights"):
        weights = make(100)
    cumem.sleep()
    with cumem.Timeline() as timeline:
        cumem.sleep()
    assert timeline.marks == ()
    cumem.wake_up()
    del weights


@pytest.mark.parametrize("how", ["closed", "dropped"])
def test_recording_ends(how: str) -> None:
    with cumem.use_memory_pool("weights"):
        weights = make(100)
    timeline = cumem.Timeline()
    if how == "closed":
        timeline.close()
        timeline.close()
        cumem.sleep()
        assert timeline.marks == ()
    del timeline
    gc.collect()
    assert (hooks._after_unmap, hooks._after_map) == ([], [])
    cumem.wake_up()
    del weights


def test_the_forms_have_every_mark(tmp_path: Path) -> None:
    with cumem.use_memory_pool("weights"):
        weights = make(20 * MIB)
    with cumem.Timeline() as timeline:
        timeline.mark("before | after")
        cumem.sleep()
    text, markdown, read = str(timeline), timeline.to_markdown(), json.loads(timeline.to_json())
    assert [line.split("  ")[0] for line in text.splitlines()] == [
        "at",
        "before | after",
        "asleep: weights",
    ]
    assert len({len(line) for line in markdown.splitlines()}) == 1
    assert len({line.replace("\\|", "").count("|") for line in markdown.splitlines()}) == 1
    assert [mark["label"] for mark in read["marks"]] == ["before | after", "asleep: weights"]
    assert read["marks"][1]["tags"][0]["mapped_bytes"] == 0
    cumem.wake_up()
    del weights


def test_a_plot_is_drawn_where_matplotlib_is(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    timeline = cumem.Timeline()
    with pytest.raises(ValueError, match="nothing was recorded"):
        timeline.plot(tmp_path / "empty.svg")
    timeline.mark("now")
    timeline.plot(tmp_path / "one.svg")
    assert "<svg" in (tmp_path / "one.svg").read_text()
    timeline.close()


def test_without_matplotlib_the_error_says_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(__import__("sys").modules, "matplotlib.figure", None)
    with cumem.Timeline() as timeline:
        timeline.mark("now")
        with pytest.raises(cumem.CumemError, match="cumem\\[plot\\]"):
            timeline.plot(tmp_path / "one.svg")
    assert list(tmp_path.iterdir()) == []


def test_wrong_arguments_are_refused() -> None:
    with pytest.raises(ValueError, match="no device"):
        cumem.Timeline("cpu:17")
    with cumem.Timeline() as timeline, pytest.raises(TypeError, match="label"):
        timeline.mark(3)
    assert timeline.marks == ()


# The hook behind it


def test_after_unmap_is_told_when_the_memory_is_gone(driver: DriverUnderTest) -> None:
    with cumem.use_memory_pool("weights"):
        weights = make(20 * MIB)
    used, told = driver.used_bytes(), []
    handle = cumem.on_after_unmap(lambda segments: told.append((segments, driver.used_bytes())))
    cumem.sleep()
    cumem.sleep()
    ((segments, now),) = told
    assert [(part.tag, part.bytes) for part in segments] == [("weights", 20 * MIB)]
    assert used - now == 20 * MIB
    handle.remove()
    cumem.wake_up()
    del weights


def test_a_failing_after_unmap_hook_leaves_everything_asleep() -> None:
    with cumem.use_memory_pool("weights"):
        weights = make(5 * MIB, seed=3)
    told: list[str] = []
    handles = [
        cumem.on_after_unmap(lambda _: told.append("first") or 1 / 0),
        cumem.on_after_unmap(lambda _: told.append("second")),
    ]
    with pytest.raises(cumem.CumemError, match=r"on_after_unmap hook .* raised.*asleep"):
        cumem.sleep()
    assert told == ["first", "second"]
    assert cumem.sleeping_tags() == {"weights"}
    for handle in handles:
        handle.remove()
    cumem.wake_up()
    del weights


def test_a_failing_after_unmap_hook_does_not_stop_a_switch() -> None:
    with cumem.use_memory_pool("a"):
        first = make(4 * MIB)
    with cumem.use_memory_pool("b"):
        second = make(4 * MIB)
    cumem.sleep(tags=["b"])
    handle = cumem.on_after_unmap(lambda _: 1 / 0)
    with pytest.raises(cumem.CumemError, match="on_after_unmap"):
        cumem.switch(sleep_tags=["a"], wake_tags=["b"])
    assert cumem.sleeping_tags() == {"a"}
    handle.remove()
    cumem.wake_up()
    del first, second
