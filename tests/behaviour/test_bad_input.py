"""Is bad input refused before anything changes, with the value and the choices named?"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from support import holds_pattern, make, state

import cumem


def situations() -> Iterator[str]:
    """Errors are the same whether the call would have had something to do or not."""
    yield "before anything was allocated"
    with cumem.use_memory_pool("weights"):
        tensor = make(1000)
    yield "awake"
    cumem.sleep()
    yield "asleep"
    cumem.wake_up()
    assert holds_pattern(tensor)


VALUES: list[tuple[Callable[[], object], str]] = [
    (lambda: cumem.sleep(level=3), "3"),
    (lambda: cumem.sleep(level=-1), "-1"),
    (lambda: cumem.sleep(tags=["wieghts"]), "'wieghts'"),
    (lambda: cumem.sleep(level=0, tags=["wieghts"]), "'wieghts'"),
    (lambda: cumem.sleep(tags=[""]), "empty"),
    (lambda: cumem.sleep(offload_tags=["wieghts"]), "'wieghts'"),
    (lambda: cumem.sleep(level=2, offload_tags=[]), "offload_tags"),
    (lambda: cumem.wake_up(["wieghts"]), "'wieghts'"),
    (lambda: cumem.wake_up([], fill="ones"), "'ones'"),
    (lambda: cumem.wake_up(fill=""), "''"),
    (lambda: cumem.epoch("wieghts"), "'wieghts'"),
    (lambda: cumem.trim("wieghts"), "'wieghts'"),
    (lambda: cumem.covered(torch.nn.Module(), "wieghts"), "'wieghts'"),
    (lambda: cumem.uncovered(torch.nn.Module(), "wieghts"), "'wieghts'"),
    (lambda: cumem.use_memory_pool(""), "empty"),
    (lambda: cumem.graph_pool(""), "empty"),
    (lambda: cumem.use_memory_pool("weights", on_sleep="drop"), "'drop'"),
    (lambda: cumem.graph_pool(on_sleep="drop"), "'drop'"),
    (lambda: cumem.use_memory_pool("weights", device=64), "64"),
    (lambda: cumem.use_memory_pool("weights", device=-1), "-1"),
    (lambda: cumem.use_memory_pool("weights", device="meta"), "'meta'"),
    (lambda: cumem.use_memory_pool("weights", device="gpu"), "'gpu'"),
    (lambda: cumem.use_memory_pool("weights", device=torch.device("meta")), "'meta'"),
    (lambda: cumem.graph_pool(device=64), "64"),
    (lambda: cumem.Options(chunk_bytes=0), "0"),
    (lambda: cumem.Options(chunk_bytes=-(2 << 20)), "-2097152"),
    (lambda: cumem.Options(chunk_bytes=3 << 20), "3145728"),
    (lambda: cumem.Options(host_limit_bytes=0), "0"),
    (lambda: cumem.Options(host_limit_bytes=-5), "-5"),
    (lambda: cumem.Options(host_threads=-1), "-1"),
    (lambda: cumem.Options(staging_bytes=4095), "4095"),
    (lambda: cumem.OnSleep("drop"), "'drop'"),
]

TYPES: list[Callable[[], object]] = [
    lambda: cumem.sleep(level="1"),
    lambda: cumem.sleep(level=True),
    lambda: cumem.sleep(level=1.0),
    lambda: cumem.sleep(level=None),
    lambda: cumem.sleep(tags="weights"),
    lambda: cumem.sleep(tags=5),
    lambda: cumem.sleep(tags=[5]),
    lambda: cumem.sleep(tags=[["weights"]]),
    lambda: cumem.sleep(offload_tags="weights"),
    lambda: cumem.sleep(offload_tags=5),
    lambda: cumem.sleep(offload_tags=[None]),
    lambda: cumem.sleep(1, ["weights"]),
    lambda: cumem.wake_up("weights"),
    lambda: cumem.wake_up(5),
    lambda: cumem.wake_up([b"weights"]),
    lambda: cumem.wake_up(fill=0),
    lambda: cumem.wake_up(None, "zero"),
    lambda: cumem.epoch(5),
    lambda: cumem.trim(5),
    lambda: cumem.trim(["weights"]),
    lambda: cumem.covered("weights"),
    lambda: cumem.covered(torch.ones(1)),
    lambda: cumem.covered(torch.nn.Module(), 5),
    lambda: cumem.uncovered("weights"),
    lambda: cumem.uncovered(torch.nn.Module(), 5),
    lambda: cumem.use_memory_pool(5),
    lambda: cumem.use_memory_pool(None),
    lambda: cumem.use_memory_pool("weights", "offload"),
    lambda: cumem.use_memory_pool("weights", on_sleep=1),
    lambda: cumem.use_memory_pool("weights", device=True),
    lambda: cumem.use_memory_pool("weights", device=1.0),
    lambda: cumem.graph_pool(5),
    lambda: cumem.graph_pool(on_sleep=1),
    lambda: cumem.is_mapped(5),
    lambda: cumem.is_mapped(torch.nn.Module()),
    lambda: cumem.tag_of("weights"),
    lambda: cumem.keep(5),
    lambda: cumem.keep("weights"),
    lambda: cumem.keep(None),
    lambda: cumem.sleep(verify="yes"),
    lambda: cumem.wake_up(verify=1),
    lambda: cumem.wake_up(wait="no"),
    lambda: cumem.configure({"chunk_bytes": 2 << 20}),
    lambda: cumem.configure(None),
    lambda: cumem.Options(2 << 20),
    lambda: cumem.Options(chunk_bytes="2 MiB"),
    lambda: cumem.Options(chunk_bytes=True),
    lambda: cumem.Options(chunk_bytes=None),
    lambda: cumem.Options(host_limit_bytes=1.5),
    lambda: cumem.Options(pin_backups=0),
    lambda: cumem.Options(allow_pageable=1),
    lambda: cumem.Options(retain_backup="yes"),
    lambda: cumem.Options(warn_empty_scope=None),
    lambda: cumem.Options(host_threads=False),
    lambda: cumem.Options(staging_bytes=1e6),
    lambda: cumem.Options(unknown=1),
]


@pytest.mark.parametrize("index", range(len(VALUES)))
def test_a_value_that_does_not_exist_is_a_value_error_that_names_it(index: int) -> None:
    call, named = VALUES[index]
    for _ in situations():
        before = state()
        with pytest.raises(ValueError) as caught:
            call()
        assert named in str(caught.value)
        assert state() == before


@pytest.mark.parametrize("index", range(len(TYPES)))
def test_a_wrong_type_is_a_type_error(index: int) -> None:
    for _ in situations():
        before = state()
        with pytest.raises(TypeError):
            TYPES[index]()
        assert state() == before


@pytest.mark.parametrize(
    ("call", "choices"),
    [
        (lambda: cumem.sleep(level=3), ["0", "1", "2"]),
        (lambda: cumem.wake_up(fill="ones"), ["'zero'", "'poison'"]),
        (lambda: cumem.use_memory_pool(on_sleep="x"), ["'offload'", "'discard'", "'keep'"]),
        (lambda: cumem.use_memory_pool(device=64), [":0"]),
    ],
)
def test_the_message_lists_the_choices(call: Callable[[], object], choices: list[str]) -> None:
    with pytest.raises(ValueError) as caught:
        call()
    assert all(choice in str(caught.value) for choice in choices)


@pytest.mark.parametrize("level", [["weights"], "weights", {"weights"}])
def test_tags_in_place_of_the_level_are_told_how_they_are_given(level: Any) -> None:
    for call in (cumem.sleep, cumem.plan_sleep):
        with pytest.raises(TypeError, match=r"level must be an int, .*tags=\[\.\.\.\]"):
            call(level)


def test_an_unknown_tag_is_told_with_the_known_ones() -> None:
    with cumem.use_memory_pool("second_tag"):
        tensor = make(10)
    with pytest.raises(ValueError, match="'second_tag'"):
        cumem.wake_up(["wieghts"])
    del tensor


def test_one_unknown_tag_among_known_ones_changes_nothing() -> None:
    with cumem.use_memory_pool("second_tag"):
        tensor = make(10)
    with pytest.raises(ValueError):
        cumem.sleep(tags=["second_tag", "wieghts"])
    assert cumem.is_mapped(tensor)
    del tensor


def test_keeping_something_with_a_wrong_leaf_keeps_nothing_of_it() -> None:
    with cumem.use_memory_pool("second_tag", on_sleep="discard"):
        tensor = make(10)
    with pytest.raises(TypeError):
        cumem.keep([tensor, 5])
    assert cumem.sleep(tags=["second_tag"]).offloaded_bytes == 0
    cumem.wake_up(["second_tag"])
    del tensor
