"""What do programs for torch_memory_saver see at the edges, where the two libraries differ?

As ``saver_scenarios.py``: where the original ends the process, the drop-in raises or has
nothing to do.
"""

from __future__ import annotations

from typing import Any

import torch
from saver_machine import DONE, ENDS, Difference, Machine, Observations, Scenario, attempt
from saver_scenarios import SCENARIOS


def _settings(saver: Any, machine: Machine) -> Observations:
    yield "enabled", saver.enabled
    yield "backups are kept at first", saver.retain_cpu_backup
    before = saver.retain_cpu_backup
    saver.retain_cpu_backup = not before
    yield "that can be changed", saver.retain_cpu_backup is not before
    saver.retain_cpu_backup = before
    saver.memory_margin_bytes = 0
    yield "margin can be read", attempt(lambda: saver.memory_margin_bytes)


def _arguments(saver: Any, machine: Machine) -> Observations:
    def region(**options: Any) -> None:
        with saver.region(**options):
            raise AssertionError("entered")

    yield "backend without backup", attempt(lambda: region(cpu_backup_backend="pinned"))
    with saver.region(tag="arguments", enable_cpu_backup=True):
        tensor = machine.empty()
    machine.fill(tensor, 1)
    saver.pause("arguments")
    yield "backup of every other word", attempt(lambda: saver.get_cpu_backup(tensor[::2]))
    yield "backup without a copy", attempt(lambda: saver.get_cpu_backup(tensor, zero_copy=True))
    part = saver.get_cpu_backup(tensor[5:20])
    saver.resume("arguments")
    yield "backup of a part", bool((part == tensor[5:20].cpu()).all())


def _retained(saver: Any, machine: Machine) -> Observations:
    with saver.region(tag="retained", enable_cpu_backup=True):
        tensor = machine.empty()
    before, saver.retain_cpu_backup = saver.retain_cpu_backup, True
    for seed in range(2):
        machine.fill(tensor, seed)
        saver.pause("retained")
        yield f"backup {seed} is new", machine.holds(saver.get_cpu_backup(tensor), seed)
        saver.resume("retained")
        yield f"contents {seed} came back", machine.holds(tensor, seed)
    yield "no backup while active", saver.get_cpu_backup(tensor) is None
    saver.retain_cpu_backup = before


def _disable(saver: Any, machine: Machine) -> Observations:
    with saver.region(tag="disable", enable_cpu_backup=True):
        first = machine.empty()
        with saver.disable():
            plain = machine.empty()
        last = machine.empty()
    machine.fill(first, 1), machine.fill(plain, 2), machine.fill(last, 3)
    yield "left again", DONE
    yield "freed by pause", machine.freed(lambda: saver.pause("disable"))
    yield "plain memory is there", machine.holds(plain, 2)
    saver.resume("disable")
    yield "the others came back", machine.holds(first, 1) and machine.holds(last, 3)


def _disable_outside(saver: Any, machine: Machine) -> Observations:
    def disable() -> None:
        with saver.disable():
            machine.empty()

    yield "outside of a region", attempt(disable)


def _pause_inside(saver: Any, machine: Machine) -> Observations:
    with saver.region(tag="inside", enable_cpu_backup=True):
        tensor = machine.empty()
        tensor.fill_(5)
        outcome = attempt(lambda: saver.pause("inside"))
    yield "pause inside the region", outcome
    if outcome == DONE:
        saver.resume("inside")
    yield "contents are there", bool((tensor == 5).all())


def _pause_twice(saver: Any, machine: Machine) -> Observations:
    yield from _twice(saver, machine, "twice", lambda: saver.pause("twice"))


def _pause_all_beside_a_paused_tag(saver: Any, machine: Machine) -> Observations:
    yield from _twice(saver, machine, "beside", saver.pause)
    saver.resume()


def _twice(saver: Any, machine: Machine, tag: str, again: Any) -> Observations:
    with saver.region(tag=tag, enable_cpu_backup=True):
        tensor = machine.empty()
    machine.fill(tensor, 1)
    yield "pause", attempt(lambda: saver.pause(tag))
    yield "pause again", attempt(again)
    saver.resume(tag)
    yield "contents came back", machine.holds(tensor, 1)


def _resume_what_is_active(saver: Any, machine: Machine) -> Observations:
    with saver.region(tag="active", enable_cpu_backup=True):
        tensor = machine.empty()
    machine.fill(tensor, 1)
    yield "made", DONE
    yield "resume", attempt(lambda: saver.resume("active"))
    yield "contents are there", machine.holds(tensor, 1)


def _backup_of_what_has_none(saver: Any, machine: Machine) -> Observations:
    with saver.region(tag="no backup"):
        tensor = machine.empty()
    yield "pause", attempt(lambda: saver.pause("no backup"))
    yield "its backup", attempt(lambda: saver.get_cpu_backup(tensor))
    yield "resume", attempt(lambda: saver.resume("no backup"))


def _backup_of_a_plain_tensor(saver: Any, machine: Machine) -> Observations:
    yield "enabled", saver.enabled
    plain = machine.empty()
    yield "its backup", attempt(lambda: saver.get_cpu_backup(plain))


def _margin(saver: Any, machine: Machine) -> Observations:
    def take(tensors: float) -> torch.Tensor:
        with saver.region(tag="margin"):
            return machine.empty(tensors)

    take(1)  # so that the context is there
    machine.wait()
    saver.memory_margin_bytes = machine.free_bytes(0) - 3 * machine.size
    yield "what leaves the margin", attempt(lambda: take(2))
    yield "what does not", attempt(lambda: take(4))
    saver.memory_margin_bytes = 0
    yield "without a margin", attempt(lambda: take(4))


def _resume_without_memory(saver: Any, machine: Machine) -> Observations:
    with saver.region(tag="short", enable_cpu_backup=True):
        tensor = machine.empty()
    machine.fill(tensor, 1)
    yield "pause", attempt(lambda: saver.pause("short"))
    machine.forget_caches()  # or a resume that is short would find what they hold
    room = machine.free_bytes(0) / machine.size
    with saver.region(tag="tenant"):
        tenant = machine.empty(room - 0.75)
    yield "resume without memory", attempt(lambda: saver.resume("short"))
    saver.pause("tenant")
    yield "resume again", attempt(lambda: saver.resume("short"))
    yield "contents came back", machine.holds(tensor, 1)
    del tenant


_PAUSED_TWICE = {"pause": DONE, "pause again": DONE, "contents came back": True}
_ENDED_BY_PAUSE = {"pause again": Difference(ENDS)}

EDGES: dict[str, Scenario] = {
    "settings": Scenario(
        _settings,
        {
            "enabled": True,
            "backups are kept at first": True,
            "that can be changed": True,
            "margin can be read": DONE,
        },
        {
            "backups are kept at first": Difference(theirs=False),
            "margin can be read": Difference("NotImplementedError"),
        },
    ),
    "arguments": Scenario(
        _arguments,
        {
            "backend without backup": "ValueError",
            "backup of every other word": "ValueError",
            "backup without a copy": "ValueError",
            "backup of a part": True,
        },
        {
            "backup of every other word": Difference("AssertionError"),
            "backup without a copy": Difference(DONE),
        },
    ),
    "retained": Scenario(
        _retained,
        {
            "backup 0 is new": True,
            "contents 0 came back": True,
            "backup 1 is new": True,
            "contents 1 came back": True,
            "no backup while active": True,
        },
        {"no backup while active": Difference(theirs=False)},
    ),
    "disable": Scenario(
        _disable,
        {
            "left again": DONE,
            "freed by pause": 2.0,
            "plain memory is there": True,
            "the others came back": True,
        },
        # It drops a pool of torch's while another is open, at which some versions abort.
        {"left again": Difference(ENDS, always=False)},
    ),
    "disable_outside": Scenario(
        _disable_outside,
        {"outside of a region": DONE},
        {"outside of a region": Difference("AssertionError")},
    ),
    "pause_inside": Scenario(
        _pause_inside,
        {"pause inside the region": "BusyError", "contents are there": True},
        {"pause inside the region": Difference(DONE)},
    ),
    "pause_twice": Scenario(_pause_twice, _PAUSED_TWICE, _ENDED_BY_PAUSE),
    "pause_all_beside_a_paused_tag": Scenario(
        _pause_all_beside_a_paused_tag, _PAUSED_TWICE, _ENDED_BY_PAUSE
    ),
    "resume_what_is_active": Scenario(
        _resume_what_is_active,
        {"made": DONE, "resume": DONE, "contents are there": True},
        {"resume": Difference(ENDS)},
    ),
    "backup_of_what_has_none": Scenario(
        _backup_of_what_has_none,
        {"pause": DONE, "its backup": "CumemError", "resume": DONE},
        {"its backup": Difference(ENDS)},
    ),
    "backup_of_a_plain_tensor": Scenario(
        _backup_of_a_plain_tensor,
        {"enabled": True, "its backup": "ValueError"},
        {"its backup": Difference(ENDS)},
    ),
    "margin": Scenario(
        _margin,
        {
            "what leaves the margin": DONE,
            "what does not": "OutOfMemoryError",
            "without a margin": DONE,
        },
        {"what does not": Difference(ENDS)},
    ),
    "resume_without_memory": Scenario(
        _resume_without_memory,  # the last: it fills the device
        {
            "pause": DONE,
            "resume without memory": "DeviceOutOfMemoryError",
            "resume again": DONE,
            "contents came back": True,
        },
        {"resume without memory": Difference(ENDS)},
    ),
}

ALL = {**SCENARIOS, **EDGES}
