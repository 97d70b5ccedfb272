"""Are the arguments of a sleep or wake right? Said before anything is touched."""

from __future__ import annotations

import os
from collections.abc import Collection, Iterable
from typing import TypeVar

from cumem import _registry
from cumem._plan import Request, require_disk_dir
from cumem._runtime import current_options
from cumem._text import choices
from cumem.options import OnSleep

_T = TypeVar("_T")

_FILLS = {"zero": 0x00, "poison": 0xFF}


def sleep_request(
    level: int, tags: Iterable[str] | None, offload_tags: Iterable[str] | None
) -> Request:
    """A validated request.

    Raises:
        ValueError: an unknown level or tag, or ``level=2`` with ``offload_tags``.
        TypeError: a wrong type.
    """
    if isinstance(level, bool) or not isinstance(level, int):
        hint = "; tags are given by name: tags=[...]" if isinstance(level, Iterable) else ""
        raise TypeError(f"level must be an int, not {shown(level)}{hint}")
    if level not in (0, 1, 2):
        raise ValueError(f"unknown level {level}; choices: 0, 1, 2")
    if offload_tags is not None and level == 2:
        raise ValueError("level=2 discards everything; it cannot be given with offload_tags")
    chosen = known_tags(tags)
    return Request(level, chosen, None if offload_tags is None else known_tags(offload_tags))


def known_tags(tags: Iterable[str] | None) -> frozenset[str]:
    """These tags, all of them known; None stands for every known tag.

    Raises:
        ValueError: an unknown tag. TypeError: one string, or a tag that is none.
    """
    known = _registry.known_tags()
    if tags is None:
        return known
    wanted = tag_list(tags)
    for tag in wanted:
        if tag not in known:
            raise ValueError(f"unknown tag {tag!r}; known tags: {choices(known)}")
    return frozenset(wanted)


def tag_list(tags: object) -> list[str]:
    """These tags, known or not.

    Raises:
        TypeError: one string, no iterable, or a tag that is no string. ValueError: an empty one.
    """
    if isinstance(tags, str):
        raise TypeError(f"tags must be a list of strings, not one string: [{tags!r}]")
    if not isinstance(tags, Iterable):
        raise TypeError(f"tags must be a list of strings or None, not {shown(tags)}")
    wanted = list(tags)
    for tag in wanted:
        check_tag(tag)
    return wanted


def check_tag(tag: object) -> None:
    """Raises TypeError unless ``tag`` is a string, ValueError when it is empty."""
    if not isinstance(tag, str):
        raise TypeError(f"a tag must be a string, not {type(tag).__name__}")
    if not tag:
        raise ValueError("a tag must not be empty")


def pool_policy(on_sleep: OnSleep | str | None, tag: str, *, has_file: bool = False) -> OnSleep:
    """What a sleep is to do with new memory of ``tag``.

    Raises:
        ValueError: an unknown policy, or one that this memory or the options do not allow.
        TypeError: neither a policy nor a string.
    """
    policy = OnSleep.of(on_sleep, tag)
    if policy is OnSleep.RELOAD and not has_file:
        raise ValueError("on_sleep='reload' is for what cumem.load_file loads: it needs a file")
    if policy is OnSleep.DISK:
        require_disk_dir()
        _check_folder(current_options().disk_dir)
    return policy


def _check_folder(disk_dir: str | None) -> None:
    if disk_dir is not None and not os.path.isdir(disk_dir):
        raise ValueError(f"on_sleep='disk' needs a folder, and disk_dir {disk_dir!r} is none")


def fill_value(fill: str | None) -> int | None:
    """The byte that ``fill`` names, or None.

    Raises:
        ValueError: an unknown name. TypeError: not a string.
    """
    if fill is None:
        return None
    if not isinstance(fill, str):
        raise TypeError(f"fill must be a string, not {type(fill).__name__}")
    if fill not in _FILLS:
        raise ValueError(f"unknown fill {fill!r}; choices: {choices(_FILLS)}")
    return _FILLS[fill]


def flag(name: str, value: object) -> bool:
    """The option of this name.

    Raises:
        TypeError: neither True nor False.
    """
    if not isinstance(value, bool):
        raise TypeError(f"{name} must be True or False, not {value!r}")
    return value


def positive(name: str, value: object) -> int:
    """The count or number of bytes of this name.

    Raises:
        TypeError: no int. ValueError: zero or less.
    """
    if type(value) is not int:
        raise TypeError(f"{name} must be an int, not {shown(value)}")
    if value <= 0:
        raise ValueError(f"{name} must be positive, not {value}")
    return value


def instance(name: str, value: object, kind: type | tuple[type, ...], wanted: str) -> None:
    """Raises TypeError unless ``value`` is of this kind; a bool is no number."""
    if not isinstance(value, kind) or isinstance(value, bool):
        raise TypeError(f"{name} must be {wanted}, not {shown(value)}")


def all_of(name: str, values: object, kind: type[_T], what: str) -> list[_T]:
    """All of them; a module that can be iterated over is still one.

    Raises:
        TypeError: one alone, no iterable, or one of another kind.
    """
    if isinstance(values, kind) or not isinstance(values, Iterable):
        hint = f"; for one alone give [{name[:-1]}]" if isinstance(values, kind) else ""
        raise TypeError(f"{name} must be a list of {what}, not {shown(values)}{hint}")
    listed = list(values)
    for value in listed:
        if not isinstance(value, kind):
            raise TypeError(f"{name} must be a list of {what}; {shown(value)} is in it")
    return listed


def shown(value: object) -> str:
    """A wrong argument in a message: a plain value as it is, of any other its type."""
    plain = value is None or isinstance(value, (bool, int, float, str))
    return repr(value) if plain else f"a {type(value).__name__}"


def described(name: str, tags: Iterable[str] | None) -> str:
    """The call as text, for messages: ``wake_up('kv_cache')``."""
    listed = tags if isinstance(tags, Collection) and not isinstance(tags, str) else ()
    return f"{name}({', '.join(repr(tag) for tag in listed)})"
