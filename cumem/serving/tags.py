"""Which tags belong to an engine, and which of them sleep?"""

from __future__ import annotations

from collections.abc import Iterable

import cumem
from cumem import _C, _registry, _runtime
from cumem._arguments import known_tags, tag_list
from cumem._loading import sleeping
from cumem._text import choices
from cumem.options import OnSleep


class OwnTags:
    """The tags of one engine; None: every tag of the process.

    Raises:
        TypeError: no list of strings. ValueError: an empty or unknown tag. In a process
            that has no pool yet every tag is accepted; :meth:`require` looks again.
    """

    def __init__(self, tags: Iterable[str] | None) -> None:
        self._tags = None if tags is None else frozenset(tag_list(tags))
        if _registry.known_tags():  # else the engine is still to be built
            self.require()

    def named(self) -> frozenset[str]:
        """All of them, known or not; of an engine that names none, those that are known."""
        return _registry.known_tags() if self._tags is None else self._tags

    def require(self) -> frozenset[str]:
        """As :meth:`named`.

        Raises:
            ValueError: one of them has had no pool.
        """
        known, named = _registry.known_tags(), self.named()
        for tag in sorted(named - known):
            raise ValueError(
                f"unknown tag {tag!r} of this engine; known tags: {choices(known)}. A tag is "
                "known once use_memory_pool() has been entered with it: make the controller, or "
                "call this, after that."
            )
        return named

    def known(self) -> frozenset[str]:
        """Those that have had a pool."""
        return self._own(known_tags(None))

    def chosen(self, tags: Iterable[str] | None) -> frozenset[str]:
        """These tags, all of them the engine's; None: all that are known.

        Raises:
            ValueError: an unknown tag, also one of the engine's own, or another engine's.
            TypeError: no list of strings.
        """
        named = self.require()
        if tags is None:
            return named
        chosen = known_tags(tags)
        for tag in sorted(chosen - self._own(chosen)):
            known = choices(self.known())
            raise ValueError(f"tag {tag!r} is not one of this engine's; its tags: {known}")
        return chosen

    def asleep(self) -> frozenset[str]:
        """Those of which something is asleep; one read of a flag where nothing is."""
        return self._own(cumem.sleeping_tags()) if _registry.anything_asleep() else frozenset()

    def lost(self) -> frozenset[str]:
        """Sleeping tags whose contents are gone, although their pools would bring them back."""
        runtime = _runtime.if_started()
        if runtime is None or not _registry.anything_asleep():
            return frozenset()
        return self._own(frozenset(info.tag for info in sleeping(runtime) if _is_lost(info)))

    def _own(self, tags: frozenset[str]) -> frozenset[str]:
        return tags if self._tags is None else tags & self._tags


def _is_lost(info: _C.SegmentInfo) -> bool:
    policy, discarded = OnSleep(info.policy), _registry.tag_state(info.tag).discarded
    return policy is not OnSleep.DISCARD and info.serial in discarded
