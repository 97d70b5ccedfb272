"""Does the drop-in for torch_memory_saver show what the original shows?

The same programs run with each, in processes that have only the one; what they see is
compared, value by value. Where the original is documented to differ, it must differ.
"""

from __future__ import annotations

import functools
import sys
from pathlib import Path

from harness import Check, need, note, run

sys.path.append(str(Path(__file__).parent.parent / "beside"))

from saver_comparison import Seen, observe, unlike, wrong
from saver_edges import ALL


@functools.cache
def _seen(library: str) -> dict[str, Seen]:
    """Of all scenarios that concern the library, run once."""
    names = [name for name, scenario in ALL.items() if library in ("cumem", scenario.original)]
    return observe(library, names)


def _note(who: str, seen: Seen) -> None:
    note(f"{who}: {seen.values}")
    if seen.ended:
        note(f"and its process ended: {seen.last_words}")


def _check_of(name: str) -> Check:
    scenario = ALL[name]

    def check() -> None:
        drop_in = _seen("cumem")[name]
        need(not drop_in.missing, drop_in.missing)
        _note("drop-in", drop_in)
        problems = wrong(scenario, drop_in)
        assert not problems, problems
        original = _seen(scenario.original)[name]
        need(not original.missing, original.missing)
        _note(scenario.original, original)
        problems = unlike(scenario, drop_in, original)
        assert not problems, problems

    check.__name__ = name
    return check


if __name__ == "__main__":
    run([_check_of(name) for name in ALL])
