"""Which libraries can be measured?"""

from __future__ import annotations

from adapters import Adapter, CumemAdapter
from peers import TmsAdapter, TmsRetainedAdapter, VllmAdapter

OURS = CumemAdapter.name

ADAPTERS: dict[str, type[Adapter]] = {
    adapter.name: adapter for adapter in (CumemAdapter, TmsAdapter, TmsRetainedAdapter, VllmAdapter)
}
