"""Where the time of a call went: by phase, and on a profiler's time line."""

from __future__ import annotations

import pytest
import torch
from support import MIB, contents_of, make, same_bytes

import cumem
from cumem import _phases


class Recorder:
    """Stands in for torch's ranges: what was opened, and how many are open."""

    def __init__(self) -> None:
        self.names: list[str] = []
        self.open = 0

    def push(self, name: str) -> None:
        self.names.append(name)
        self.open += 1

    def pop(self) -> None:
        self.open -= 1


@pytest.fixture
def ranges(monkeypatch: pytest.MonkeyPatch) -> Recorder:
    recorder = Recorder()
    monkeypatch.setattr(_phases, "has_nvtx", lambda: True)
    monkeypatch.setattr(torch.cuda.nvtx, "range_push", recorder.push)
    monkeypatch.setattr(torch.cuda.nvtx, "range_pop", recorder.pop)
    return recorder


def weights() -> torch.Tensor:
    with cumem.use_memory_pool("weights"):
        return make(4 * MIB, 3)


def test_reports_say_how_long_planning_and_booking_took() -> None:
    tensor = weights()
    slept, woken = cumem.sleep(), cumem.wake_up()
    assert {"snapshot", "decide", "book", "copy", "release"} <= slept.phases.keys()
    assert {"decide", "book"} <= woken.phases.keys()
    assert all(seconds >= 0 for seconds in (*slept.phases.values(), *woken.phases.values()))
    assert same_bytes(tensor, contents_of(tensor, 3))


def test_ranges_are_marked_only_where_they_are_asked_for(ranges: Recorder) -> None:
    tensor = weights()
    cumem.sleep()
    cumem.wake_up()
    assert ranges.names == []
    cumem.configure(cumem.Options(nvtx=True))
    cumem.sleep()
    cumem.wake_up()
    assert ranges.open == 0
    assert (ranges.names[:5]) == [
        "cumem.snapshot",
        "cumem.decide",
        "cumem.hooks",
        "cumem.sleep",
        "cumem.book",
    ]
    assert "cumem.wake" in ranges.names[5:]
    assert same_bytes(tensor, contents_of(tensor, 3))


def test_a_switch_is_a_range_of_its_own(ranges: Recorder) -> None:
    first = weights()
    with cumem.use_memory_pool("other"):
        second = make(4 * MIB, 4)
    cumem.sleep(tags=["other"])
    cumem.configure(cumem.Options(nvtx=True))
    report = cumem.switch(sleep_tags=["weights"], wake_tags=["other"])
    assert (ranges.open, ranges.names.count("cumem.switch")) == (0, 1)
    assert {"snapshot", "decide", "book"} <= report.sleep.phases.keys()
    assert same_bytes(second, contents_of(second, 4))
    del first


def test_a_range_ends_where_a_hook_raises(ranges: Recorder) -> None:
    tensor = weights()
    cumem.configure(cumem.Options(nvtx=True))

    def refuse(_segments: object) -> None:
        raise RuntimeError("no")

    handle = cumem.on_before_unmap(refuse)
    with pytest.raises(cumem.CumemError):
        cumem.sleep()
    handle.remove()
    assert ranges.open == 0
    assert ranges.names[-1] == "cumem.hooks"
    assert same_bytes(tensor, contents_of(tensor, 3))


def test_without_ranges_in_torch_the_option_changes_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(_phases, "has_nvtx", lambda: False)
    monkeypatch.setattr(torch.cuda.nvtx, "range_push", None)  # a call would raise
    tensor = weights()
    cumem.configure(cumem.Options(nvtx=True))
    cumem.sleep()
    cumem.wake_up()
    assert same_bytes(tensor, contents_of(tensor, 3))
