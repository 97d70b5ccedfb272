"""Which tags belong to an engine, and which of them sleep?"""

from __future__ import annotations

from collections.abc import Iterable

import cumem
from cumem import _registry
from cumem._arguments import check_tag, known_tags
from cumem._text import choices


class OwnTags:
    """The tags of one engine; None: every tag of the process."""

    def __init__(self, tags: Iterable[str] | None) -> None:
        if isinstance(tags, str):
            raise TypeError(f"tags must be a list of strings, not one string: [{tags!r}]")
        self._tags = None if tags is None else frozenset(tags)
        for tag in self._tags or ():
            check_tag(tag)

    def known(self) -> frozenset[str]:
        """Those that have had a pool."""
        return self._own(known_tags(None))

    def chosen(self, tags: Iterable[str] | None) -> frozenset[str]:
        """These tags, all of them the engine's; None: all that are known.

        Raises:
            ValueError: an unknown tag, or another engine's. TypeError: no list of strings.
        """
        chosen = known_tags(tags)
        if tags is None:
            return self._own(chosen)
        for tag in sorted(chosen - self._own(chosen)):
            known = choices(self.known())
            raise ValueError(f"tag {tag!r} is not one of this engine's; its tags: {known}")
        return chosen

    def asleep(self) -> frozenset[str]:
        """Those of which something is asleep; one read of a flag where nothing is."""
        return self._own(cumem.sleeping_tags()) if _registry.anything_asleep() else frozenset()

    def _own(self, tags: frozenset[str]) -> frozenset[str]:
        return tags if self._tags is None else tags & self._tags
