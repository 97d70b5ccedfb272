"""What is in a safetensors file, and is it whole?

A file is judged by its header alone, before anything is mapped or allocated.

Note [What a header must prove]: a file is its length prefix, its header and its
payload, and the tensors cover the payload in one piece, without overlap or gap. So a
file that was cut short or appended to is found before its first tensor is read. One
that shrinks afterwards is not: reading a map past its end ends a process.
"""

from __future__ import annotations

import hashlib
import json
import stat
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from reprlib import Repr
from typing import Any

from cumem._text import choices, size
from cumem.errors import CheckpointError

MOST_HEADER_BYTES = 100_000_000  # the limit of the format's own library
_MOST_ELEMENTS = 1 << 63
_PREFIX_BYTES = 8
METADATA = "__metadata__"

_NAMES_BY_BITS = {
    4: "F4",
    6: "F6_E2M3 F6_E3M2",
    8: "BOOL U8 I8 F8_E4M3 F8_E4M3FNUZ F8_E5M2 F8_E5M2FNUZ F8_E8M0",
    16: "U16 I16 F16 BF16",
    32: "U32 I32 F32",
    64: "U64 I64 F64 C64",
}
_PAIRED = "F4"  # two of them are one element of torch's
_BITS = {name: bits for bits, names in _NAMES_BY_BITS.items() for name in names.split()}


@dataclass(frozen=True)
class TensorEntry:
    """One tensor of a file: bytes ``begin`` to ``end`` of the file, row-major."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    begin: int
    end: int

    @property
    def bytes(self) -> int:
        return self.end - self.begin


@dataclass(frozen=True)
class Header:
    """What a file holds.

    Attributes:
        tensors: by name, in the order of the file's bytes.
        metadata: the file's own notes.
        file_bytes: length of the file when it was read.
        header_bytes: of these, what comes before the tensors.
        digest: SHA-256 of these.
    """

    path: Path
    tensors: Mapping[str, TensorEntry]
    metadata: Mapping[str, str]
    file_bytes: int
    header_bytes: int
    digest: str

    @property
    def tensor_bytes(self) -> int:
        return sum(entry.bytes for entry in self.tensors.values())


_repr = Repr()
_repr.maxstring = _repr.maxother = 120


def brief(value: object) -> str:
    """How a value of a file is quoted: it may be of any length."""
    return _repr.repr(value)


def fault(path: Path, what: str, left: str = "Nothing was loaded.") -> CheckpointError:
    """The error for what is wrong with a file."""
    return CheckpointError(f"{path}: {what}. {left}")


def reason_of(error: OSError | ValueError) -> str:
    """Why something cannot be read, in short."""
    return (error.strerror if isinstance(error, OSError) else None) or str(error)


def read_header(path: str | Path) -> Header:
    """Reads and judges the header of one file; the tensors are not touched.

    Raises:
        CheckpointError: it cannot be read, or is not a whole safetensors file.
    """
    file = Path(path)
    text, file_bytes = _header_text(file)
    fields = parse_object(file, text, "header")
    metadata = _metadata(file, fields.pop(METADATA, {}))
    start = _PREFIX_BYTES + len(text)
    prefix = len(text).to_bytes(_PREFIX_BYTES, "little")
    entries = [_entry(file, name, value, start) for name, value in fields.items()]
    entries.sort(key=lambda entry: (entry.begin, entry.end))
    _check_layout(file, entries, start, file_bytes)
    tensors = {entry.name: entry for entry in entries}
    digest = hashlib.sha256(prefix + text).hexdigest()
    return Header(file, tensors, metadata, file_bytes, start, digest)


def _header_text(file: Path) -> tuple[bytes, int]:
    """The header's bytes, and the length of the file."""
    try:
        status = file.stat()
        if not stat.S_ISREG(status.st_mode):  # opening a pipe would wait for a writer
            raise fault(file, "it is not a regular file")
        with file.open("rb") as stream:
            length = _header_length(file, stream.read(_PREFIX_BYTES), status.st_size)
            text = stream.read(length)
    except CheckpointError:
        raise
    except (OSError, ValueError) as error:  # the latter: a path that no file can have
        raise fault(file, f"it cannot be read ({reason_of(error)})") from error
    if len(text) != length:
        raise fault(file, "it was cut short while it was read")
    return text, status.st_size


def _header_length(file: Path, prefix: bytes, file_bytes: int) -> int:
    if len(prefix) < _PREFIX_BYTES:
        raise fault(file, f"a safetensors file has at least 8 bytes, this one has {file_bytes}")
    length = int.from_bytes(prefix, "little")
    if length > MOST_HEADER_BYTES:
        raise fault(
            file,
            f"it is no safetensors file: its header would have {length} bytes, "
            "more than the allowed 100 MB",
        )
    if length > file_bytes - _PREFIX_BYTES:
        raise fault(file, f"its header would have {length} bytes, the file has {file_bytes}")
    return length


def parse_object(file: Path, text: bytes, what: str) -> dict[str, Any]:
    """A JSON object without duplicate names, from the part of ``file`` that is called ``what``.

    Raises:
        CheckpointError: it is not one.
    """

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        result = dict(pairs)
        if len(result) != len(pairs):
            ((twice, _),) = Counter(name for name, _ in pairs).most_common(1)
            raise fault(file, f"the name {brief(twice)} is in its {what} twice")
        return result

    try:
        parsed = json.loads(text.decode("utf-8"), object_pairs_hook=unique)
    except CheckpointError:
        raise
    except (ValueError, RecursionError) as error:
        raise fault(file, f"its {what} is not valid JSON ({error})") from error
    if not isinstance(parsed, dict):
        raise fault(file, f"its {what} is not a JSON object")
    return parsed


def _metadata(file: Path, value: Any) -> dict[str, str]:
    if not isinstance(value, dict) or not all(isinstance(text, str) for text in value.values()):
        raise fault(file, f"{METADATA} is not a map of strings")
    return value


def _entry(file: Path, name: str, value: Any, start: int) -> TensorEntry:
    tensor = f"tensor {brief(name)}"
    if not isinstance(value, dict) or not {"dtype", "shape", "data_offsets"} <= value.keys():
        raise fault(file, f"{tensor} needs dtype, shape and data_offsets")
    dtype, shape, offsets = value["dtype"], value["shape"], value["data_offsets"]
    if not isinstance(dtype, str) or dtype not in _BITS:
        known = choices(_BITS)
        raise fault(file, f"{tensor} has the unknown dtype {brief(dtype)}; known: {known}")
    if not _are_counts(shape):
        raise fault(file, f"{tensor} has the impossible shape {brief(shape)}")
    if not _are_counts(offsets) or len(offsets) != 2 or offsets[0] > offsets[1]:
        raise fault(file, f"{tensor} has the impossible offsets {brief(offsets)}")
    entry = TensorEntry(name, dtype, tuple(shape), start + offsets[0], start + offsets[1])
    if _elements(shape) * _BITS[dtype] != 8 * entry.bytes:
        wanted = f"{dtype} of shape {brief(shape)}"
        raise fault(file, f"{tensor} has {entry.bytes} bytes, not what {wanted} takes")
    if dtype == _PAIRED and shape[-1] % 2:  # torch has no shape for it
        raise fault(
            file, f"{tensor} has the shape {brief(shape)}: rows of {dtype} end in half a byte"
        )
    return entry


def _are_counts(value: Any) -> bool:
    """A list of whole numbers of 0 to 2^63? (In Python, True is an int.)"""
    return isinstance(value, list) and all(
        type(item) is int and 0 <= item < _MOST_ELEMENTS for item in value
    )


def _elements(shape: list[int]) -> int:
    """Their number; no more than is needed to see that no file can hold them, or no tensor.

    Strides are counted past an axis without elements: the others must not be too long.
    """
    product = 1
    for length in shape:
        product *= max(1, length)
        if product >= _MOST_ELEMENTS:
            return product
    return 0 if 0 in shape else product


def _check_layout(file: Path, entries: list[TensorEntry], start: int, file_bytes: int) -> None:
    """See Note [What a header must prove]; entries are in order."""
    at, before = start, "the header"
    for entry in entries:
        tensor = f"tensor {brief(entry.name)}"
        if entry.begin < at:
            raise fault(file, f"{tensor} overlaps {before}")
        if entry.begin > at:
            raise fault(file, f"there is a gap of {entry.begin - at} bytes before {tensor}")
        at, before = entry.end, tensor
    if at > file_bytes:
        missing = f"{before} ends at byte {at}, the file at {file_bytes}"
        raise fault(file, f"it is truncated: {missing} ({size(at - file_bytes)} are missing)")
    if at < file_bytes:
        raise fault(file, f"{file_bytes - at} bytes follow its last tensor and belong to none")
