"""Is a text told in pieces the text that all its tokens make, and at what cost?

With a small tokenizer of each kind that the server meets: bytes, byte-level BPE, and pieces
with leading spaces that fall back to bytes.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

import pytest

from cumem.serving.growing_text import GrowingText
from cumem.serving.texts import decode_bytes

Decode = Callable[[Sequence[int]], str]

TEXT = "The weights went to sleep,  and woke - naïve 你好世界 👩‍👩‍👧 ﬁn. " * 3
SEEDS = range(40)


class ByteLevel:
    """Tokens are bytes or some of them in a row, cut anywhere; special ones are left out."""

    def __init__(self) -> None:
        data, some = TEXT.encode(), random.Random(1)
        starts = [some.randrange(len(data) - 5) for _ in range(300)]
        runs = {data[at : at + some.randint(2, 5)] for at in starts}
        self.tokens = [*(bytes([byte]) for byte in range(256)), *sorted(runs), b""]
        self.special = len(self.tokens) - 1

    def decode(self, tokens: Sequence[int]) -> str:
        return b"".join(self.tokens[token] for token in tokens).decode(errors="replace")

    def encode(self, text: str, some: random.Random) -> list[int]:
        """One of many ways to say it."""
        data, found = text.encode(), list[int]()
        while data:
            fits = [at for at, token in enumerate(self.tokens) if token and data.startswith(token)]
            found.append(some.choice(fits))
            data = data[len(self.tokens[found[-1]]) :]
        return found


class LeadingSpaces:
    """Pieces whose spaces are in front; the first one of a text is dropped. Others are bytes."""

    pieces = ("▁", "▁the", "▁to", "▁sl", "ee", "p", "▁▁", ",", "T", "he", "w", "o", "k", "▁a", "")
    special = 256 + len(pieces) - 1

    def decode(self, tokens: Sequence[int]) -> str:
        text, run = "", bytearray()
        for token in [*(token for token in tokens if token != self.special), self.special]:
            if token < 256:
                run.append(token)
                continue
            text += self._bytes(bytes(run)) + self.pieces[token - 256]
            run.clear()
        return text.replace("▁", " ").removeprefix(" ")

    @staticmethod
    def _bytes(run: bytes) -> str:
        try:
            return run.decode()
        except UnicodeDecodeError:
            return "\ufffd" * len(run)

    def encode(self, text: str, some: random.Random) -> list[int]:
        left, found = "▁" + text.replace(" ", "▁"), list[int]()
        while left:
            fits = [at for at, piece in enumerate(self.pieces) if piece and left.startswith(piece)]
            if fits:
                at = some.choice(fits)
                found.append(256 + at)
                left = left[len(self.pieces[at]) :]
            else:
                found += left[0].encode()
                left = left[1:]
        return found


def pieces_of(decode: Decode, tokens: Sequence[int]) -> list[str]:
    """The pieces, those that are empty too; the last one is the rest."""
    text = GrowingText(decode)
    return [*(text.add(token) for token in tokens), text.rest()]


@pytest.mark.parametrize("kind", [ByteLevel, LeadingSpaces])
def test_pieces_are_the_text_and_have_whole_letters_only(
    kind: type[ByteLevel] | type[LeadingSpaces],
) -> None:
    tokenizer = kind()
    for seed in SEEDS:
        some = random.Random(seed)
        start = some.randrange(len(TEXT))
        tokens = tokenizer.encode(TEXT[start : start + some.randrange(1, 120)], some)
        for _ in range(some.choice([0, 3, 30])):
            tokens.insert(some.randrange(len(tokens) + 1), tokenizer.special)
        assert tokenizer.decode(tokens).strip() in TEXT
        pieces = pieces_of(tokenizer.decode, tokens)
        assert "".join(pieces) == tokenizer.decode(tokens), seed
        assert not any("\ufffd" in piece for piece in pieces), seed


@pytest.mark.parametrize(
    ("decode", "vocabulary"),
    [
        (decode_bytes, range(300)),
        (decode_bytes, range(0x80, 256)),  # hardly a letter
        (ByteLevel().decode, range(len(ByteLevel().tokens))),
        (LeadingSpaces().decode, range(256, 256 + len(LeadingSpaces.pieces))),
        (LeadingSpaces().decode, (256, LeadingSpaces.special)),
    ],
)
def test_pieces_of_any_tokens_are_what_all_tokens_make(
    decode: Decode, vocabulary: Sequence[int]
) -> None:
    for seed in SEEDS:
        tokens = random.Random(seed).choices(vocabulary, k=seed * 2)
        assert "".join(pieces_of(decode, tokens)) == decode(tokens), seed


def test_a_letter_of_several_tokens_comes_when_it_is_whole() -> None:
    tokens = [*"é😀".encode(), 300, 0xE4, 0xBD]
    pieces = ["", "é", "", "", "", "😀", "<300>", "", "", "\ufffd"]
    assert pieces_of(decode_bytes, tokens) == pieces


def test_letters_that_were_told_stay_where_the_decoder_would_take_them_back() -> None:
    tokenizer = LeadingSpaces()
    the = 256 + LeadingSpaces.pieces.index("▁the")
    assert pieces_of(tokenizer.decode, [the, 0xE4, 0xBD]) == ["the", "", "", "\ufffd\ufffd"]
    tokens = [the, *"你".encode(), 0xFF, the]
    assert tokenizer.decode(tokens) == "the\ufffd\ufffd\ufffd\ufffd the"
    assert "".join(pieces_of(tokenizer.decode, tokens)) == "the你\ufffd\ufffd\ufffd the"


@pytest.mark.parametrize(
    ("tokenizer", "tokens", "most"),
    [
        (ByteLevel(), ByteLevel().encode(TEXT * 12, random.Random(0)), 8),
        (LeadingSpaces(), LeadingSpaces().encode(TEXT * 12, random.Random(0)), 8),
        (ByteLevel(), [0xFF] * 2000, 20),  # nothing but U+FFFD
        (ByteLevel(), [65, *[ByteLevel().special] * 2000], 8),  # a text that does not go on
    ],
)
def test_a_token_costs_the_decoding_of_a_few_however_long_the_text(
    tokenizer: ByteLevel | LeadingSpaces, tokens: list[int], most: int
) -> None:
    decoded = 0

    def counted(asked: Sequence[int]) -> str:
        nonlocal decoded
        decoded += len(asked)
        return tokenizer.decode(asked)

    assert "".join(pieces_of(counted, tokens)) == tokenizer.decode(tokens)
    assert len(tokens) > 1000
    assert decoded <= most * len(tokens)
