"""Does the schedule of a model host serve everybody, and never take a model in use?"""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cumem.errors import DeviceOutOfMemoryError
from cumem.serving._schedule import ModelState, Resident, Room, Schedule, Step, Waiter

GIB = 1 << 30


def schedule_of(budget: int, sizes: dict[str, int], *, patience: int = 3) -> Schedule:
    """A schedule with sleeping models of these sizes."""
    models = {
        name: Resident(name, bytes=size, state=ModelState.ASLEEP) for name, size in sizes.items()
    }
    return Schedule(budget, patience, models)


def bring(schedule: Schedule, step: Step | None) -> list[Waiter]:
    """Carries a step out in the books, and serves those who waited for it."""
    assert step is not None
    for victim in step.victims:
        assert not victim.users, "a model in use was to go to sleep"
        assert not victim.pinned
        victim.state, victim.mapped_bytes = ModelState.ASLEEP, 0
    step.model.state, step.model.mapped_bytes = ModelState.AWAKE, step.model.bytes
    total = sum(model.mapped_bytes for model in schedule.models.values())
    assert total <= schedule.budget_bytes
    return schedule.serve_arrived(step.model)


def awake(schedule: Schedule, *names: str) -> None:
    for name in names:
        model = schedule.models[name]
        model.state, model.mapped_bytes = ModelState.AWAKE, model.bytes
        schedule.touch(model)


def names_of(step: Step | None) -> list[str]:
    return [victim.name for victim in step.victims] if step is not None else []


def test_nobody_goes_where_there_is_room() -> None:
    schedule = schedule_of(10, {"a": 4, "b": 4})
    awake(schedule, "a")
    schedule.queue(schedule.models["b"], 0)
    assert names_of(schedule.next_step()) == []


def test_the_least_recently_used_goes_first_and_none_too_many() -> None:
    schedule = schedule_of(10, {"small": 2, "old": 4, "new": 4, "wanted": 5})
    awake(schedule, "small", "old", "new")
    schedule.queue(schedule.models["wanted"], 0)
    # small alone is not enough, and once old goes as well, small may stay only if 4 suffice.
    assert names_of(schedule.next_step()) == ["small", "old"]
    schedule.models["wanted"].bytes = 4
    assert names_of(schedule.next_step()) == ["old"]


def test_a_pinned_model_stays() -> None:
    schedule = schedule_of(10, {"pinned": 5, "other": 5, "wanted": 5})
    schedule.models["pinned"].pinned = True
    awake(schedule, "pinned", "other")
    schedule.queue(schedule.models["wanted"], 0)
    assert names_of(schedule.next_step()) == ["other"]


def test_what_can_never_fit_is_said_with_the_reason() -> None:
    schedule = schedule_of(10 * GIB, {"pinned": 6 * GIB, "wanted": 5 * GIB})
    schedule.models["pinned"].pinned = True
    awake(schedule, "pinned")
    schedule.queue(schedule.models["wanted"], 0)
    with pytest.raises(DeviceOutOfMemoryError, match=r"needs 5.0 GiB.*10.0 GiB.*'pinned' \(6.0"):
        schedule.next_step()


def test_an_unknown_size_takes_all_that_may_sleep() -> None:
    schedule = schedule_of(10, {"pinned": 2, "a": 2, "b": 2})
    schedule.models["pinned"].pinned = True
    awake(schedule, "pinned", "a", "b")
    new = schedule.models["new"] = Resident("new")
    schedule.queue(new, 0)
    step = schedule.next_step()
    assert names_of(step) == ["a", "b"]
    assert step is not None
    assert schedule.room_beside(step) == Room(now=8, most=8)


def test_models_in_use_are_waited_for_and_drain() -> None:
    schedule = schedule_of(10, {"a": 6, "b": 6})
    awake(schedule, "a")
    first = schedule.queue(schedule.models["a"], 0)
    assert schedule.servable() == [first]
    schedule.serve(first)
    schedule.queue(schedule.models["b"], 0)
    assert schedule.next_step() is None
    late = schedule.queue(schedule.models["a"], 0)
    assert schedule.servable() == []
    schedule.models["a"].users = 0
    assert [waiter.model.name for waiter in bring(schedule, schedule.next_step())] == ["b"]
    assert schedule.waiting == [late]


def test_models_that_need_not_go_are_given_meanwhile() -> None:
    schedule = schedule_of(12, {"a": 6, "b": 6, "c": 4})
    awake(schedule, "a", "c")
    schedule.models["a"].users = 1
    schedule.touch(schedule.models["c"])
    schedule.queue(schedule.models["b"], 0)
    schedule.models["c"].users = 1
    assert schedule.next_step() is None
    other = schedule.queue(schedule.models["c"], 0)
    assert schedule.servable() == [other]


def test_a_model_that_came_is_given_to_all_who_wait_and_not_to_later_ones() -> None:
    schedule = schedule_of(10, {"a": 6, "b": 6})
    for name in ("a", "b", "a", "b", "a"):
        schedule.queue(schedule.models[name], 0)
    assert len(bring(schedule, schedule.next_step())) == 3
    schedule.queue(schedule.models["a"], 0)
    assert schedule.servable() == []
    schedule.models["a"].users = 0
    assert len(bring(schedule, schedule.next_step())) == 2


def test_priority_goes_before_age() -> None:
    schedule = schedule_of(10, {"a": 6, "b": 6, "c": 6})
    schedule.queue(schedule.models["a"], 0)
    schedule.queue(schedule.models["b"], 5)
    schedule.queue(schedule.models["c"], 1)
    order = []
    while schedule.waiting:
        (served,) = bring(schedule, schedule.next_step())
        order.append(served.model.name)
        served.model.users = 0
    assert order == ["b", "c", "a"]


def test_a_low_priority_is_overtaken_as_often_as_patience_says() -> None:
    schedule = schedule_of(10, {"low": 6, "x": 6, "y": 6}, patience=4)
    schedule.queue(schedule.models["low"], 0)
    served = []
    for turn in range(12):
        schedule.queue(schedule.models["xy"[turn % 2]], 9)
        (waiter,) = bring(schedule, schedule.next_step())
        served.append(waiter.model.name)
        waiter.model.users = 0
    assert served.index("low") == 4


def test_a_busy_model_of_high_priority_gives_way_after_a_while() -> None:
    schedule = schedule_of(10, {"low": 6, "busy": 6}, patience=4)
    awake(schedule, "busy")
    schedule.models["busy"].users = 1
    schedule.queue(schedule.models["low"], 0)
    for _ in range(4):
        waiter = schedule.queue(schedule.models["busy"], 9)
        assert schedule.servable() == [waiter]
        schedule.serve(waiter)
    schedule.queue(schedule.models["busy"], 9)
    assert schedule.servable() == []
    schedule.models["busy"].users = 0
    assert [w.model.name for w in bring(schedule, schedule.next_step())] == ["low"]


def test_hints_come_last_and_disturb_nobody() -> None:
    schedule = schedule_of(10, {"a": 6, "b": 6, "c": 6})
    awake(schedule, "a")
    schedule.models["a"].users = 1
    schedule.hints.append(schedule.models["b"])
    assert schedule.next_step() is None
    schedule.models["a"].users = 0
    waiter = schedule.queue(schedule.models["c"], 0)
    step = schedule.next_step()
    assert step is not None
    assert step.model.name == "c"
    assert bring(schedule, step) == [waiter]
    assert schedule.next_step() is None
    schedule.models["c"].users = 0
    step = schedule.next_step()
    assert step is not None
    assert (step.model.name, names_of(step)) == ("b", ["c"])


@settings(deadline=None, max_examples=25)
@given(
    st.integers(0, 2**32),
    st.lists(st.integers(1, 9), min_size=2, max_size=6),
    st.integers(1, 5),
)
def test_everybody_is_served_whatever_comes(seed: int, sizes: list[int], patience: int) -> None:
    """Random arrivals with random priorities; each use ends after a while."""
    chance = random.Random(seed)
    names = [f"m{index}" for index in range(len(sizes))]
    schedule = schedule_of(9, dict(zip(names, sizes, strict=True)), patience=patience)
    using: list[tuple[int, Waiter]] = []  # when it ends, who
    longest, arrived = 0, 0
    started: dict[Waiter, int] = {}
    for now in range(400):
        if now < 200:
            model = schedule.models[chance.choice(names)]
            started[schedule.queue(model, chance.randint(0, 3))] = now
            arrived += 1
        for _, waiter in [one for one in using if one[0] <= now]:
            waiter.model.users -= 1
        using = [one for one in using if one[0] > now]
        served = list(schedule.servable())
        for waiter in served:
            schedule.serve(waiter)
        if (step := schedule.next_step()) is not None:
            served += bring(schedule, step)
        for waiter in served:
            using.append((now + chance.randint(1, 4), waiter))
            longest = max(longest, now - started.pop(waiter))
    assert arrived == 200
    assert not started, "somebody was never served"
    assert longest < 40 * (patience + len(sizes))
