"""Which libraries can be measured?"""

from __future__ import annotations

from collections.abc import Iterable

from adapters import Adapter, CumemAdapter
from drop_ins import CumemAsTmsAdapter, CumemAsTmsRetainedAdapter, CumemAsVllmAdapter
from peers import TmsAdapter, TmsRetainedAdapter, VllmAdapter

OURS = CumemAdapter.name

_ALL: tuple[type[Adapter], ...] = (
    CumemAdapter,
    *(TmsAdapter, CumemAsTmsAdapter),
    *(TmsRetainedAdapter, CumemAsTmsRetainedAdapter),
    *(VllmAdapter, CumemAsVllmAdapter),
)

ADAPTERS: dict[str, type[Adapter]] = {adapter.name: adapter for adapter in _ALL}

_DROP_IN = "cumem-as-"


def originals(names: Iterable[str]) -> list[tuple[str, str]]:
    """(original, drop-in) of these libraries, where both are among them."""
    found = list(names)
    pairs = [(name.removeprefix(_DROP_IN), name) for name in found if name.startswith(_DROP_IN)]
    return [pair for pair in pairs if pair[0] in found]
