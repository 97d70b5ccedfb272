"""How does ``async with`` end what serves?"""

from __future__ import annotations

from abc import ABC, abstractmethod
from types import TracebackType
from typing import TypeVar

from cumem.errors import BusyError

_Closing = TypeVar("_Closing", bound="ClosedAtExit")


class ClosedAtExit(ABC):
    """Closed at the end of an ``async with`` block.

    That it is busy then is told only where the block itself went well.
    """

    @abstractmethod
    async def close(self) -> None:
        """Ends it."""

    async def __aenter__(self: _Closing) -> _Closing:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        try:
            await self.close()
        except BusyError:
            if error is None:  # else that is what went wrong first
                raise
