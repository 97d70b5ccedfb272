"""What do tests of hooks share? Hooks that note their calls, and are taken back."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import cumem

Segments = tuple[cumem.SegmentRange, ...]


class Hooks:
    """Registers hooks, notes every call in order, and takes them all back."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, Segments]] = []
        self._handles: list[cumem.HookHandle] = []

    def before(self, name: str = "before", action: Callable[[Segments], Any] | None = None) -> None:
        self._add(cumem.on_before_unmap, name, action)

    def after(self, name: str = "after", action: Callable[[Segments], Any] | None = None) -> None:
        self._add(cumem.on_after_map, name, action)

    def _add(self, register: Any, name: str, action: Callable[[Segments], Any] | None) -> None:
        def hook(segments: Segments) -> None:
            self.calls.append((name, segments))
            if action is not None:
                action(segments)

        self._handles.append(register(hook))

    @property
    def names(self) -> list[str]:
        return [name for name, _ in self.calls]

    def tags_of(self, name: str) -> list[set[str]]:
        return [{one.tag for one in segments} for told, segments in self.calls if told == name]

    def remove(self) -> None:
        while self._handles:  # which hold the tensors of the test
            self._handles.pop().remove()


def fail(_segments: Segments) -> None:
    raise KeyError("mine")
