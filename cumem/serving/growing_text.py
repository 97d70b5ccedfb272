"""What text do tokens make, told while they come?

Note [A window of tokens]: all tokens are not decoded again for each new one. What was told
once decides nothing any more but how the next token joins it (a tokenizer drops the space
before its first piece), so the tokens told last are kept in front of the new ones, and all
before them are forgotten. A letter may be several tokens: U+FFFD at the end may still become
one, and is held back.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

_UNKNOWN = "\ufffd"
_MOST_UNFINISHED = 3  # bytes of a letter of UTF-8 without its last: at most a U+FFFD for each
_LONGEST = 8  # tokens that wait for the end of a letter; one has 4 bytes at most


class GrowingText:
    """The text of tokens that come one by one, in pieces without unfinished letters.

    All pieces and :meth:`rest` together are what ``decode`` makes of all tokens at once. A
    token costs the decoding of a few, however long the text is. What was told cannot be taken
    back, and some decoders do that: where bytes that are no text follow whole letters that are
    made of bytes, too, they replace those letters. Then the pieces keep them.

    Args:
        decode: makes text of tokens.
    """

    def __init__(self, decode: Callable[[Sequence[int]], str]) -> None:
        self._decode = decode
        self._window: list[int] = []
        self._context = 0  # tokens of the window that were settled before
        self._told = 0  # characters of the window's text

    def add(self, token: int) -> str:
        """What is certain now and was not told yet; often empty."""
        self._window.append(token)
        text = self._decode(self._window)
        new = len(self._window) - self._context
        certain = len(text) - _unfinished(text, new)
        piece = text[self._told : certain]
        if not piece and 0 < self._told == certain == len(text):
            self._window.pop()  # it is no text, as a special token, and joins nothing
            return ""
        self._told = max(self._told, certain)
        if (piece and certain == len(text)) or new > _LONGEST:
            self._settle(len(text) - self._told)
        return piece

    def rest(self) -> str:
        """What was held back, once there are no more tokens."""
        return self._decode(self._window)[self._told :]

    def _settle(self, untold: int) -> None:
        """Forgets what came before the new tokens; these are what the next ones join."""
        kept = self._window[self._context :]
        told = len(self._decode(kept)) - untold
        if told > 0:  # else there would be nothing to join
            self._window, self._context, self._told = kept, len(kept), told


def _unfinished(text: str, new: int) -> int:
    """How many characters at the end may be a part of the next letter, after ``new`` tokens.

    All of them at first: some decoders say U+FFFD of the letters before it, too.
    """
    unknown = len(text) - len(text.rstrip(_UNKNOWN))
    return unknown if new <= _LONGEST else min(unknown, _MOST_UNFINISHED)
