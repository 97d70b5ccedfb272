"""What is a snapshot of a module, as a file?

A safetensors file that any reader of the format can open: each tensor by its name,
row-major, with its shape and type. The notes of the file say the rest: that it is a
snapshot and of which version, which names share a tensor, which tensors do not lie
row-major in memory, and the digest of each tensor's bytes in the file. (Version 1 had no
digests.)
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from cumem._coverage import has_memory, place_of
from cumem._dtypes import file_dtype, file_shape
from cumem._safetensors import Header, brief, fault, parse_object
from cumem._snapshot_digests import ALGORITHM, DIGITS

_KEY = "cumem_snapshot"
_VERSION = 2
_WITHOUT_DIGESTS = 1
_ALIGNMENT = 8  # of the payload, as the format's own library has it


@dataclass(frozen=True)
class Notes:
    """What a snapshot says besides its tensors.

    Attributes:
        module: the kind of module it was made of.
        ties: names that are not in the file, each with the name in the file that it shares
            its tensor with.
        strides: in elements, of the tensors that are not row-major.
        extra: names of tensors that are not the module's.
        digests: of each tensor in the file, as hexadecimal digits; None: not known.
    """

    module: str
    ties: Mapping[str, str]
    strides: Mapping[str, tuple[int, ...]]
    extra: tuple[str, ...]
    digests: Mapping[str, str] | None = None

    def to_metadata(self) -> dict[str, str]:
        body = {
            "version": _VERSION,
            "module": self.module,
            "ties": dict(self.ties),
            "strides": {name: list(strides) for name, strides in self.strides.items()},
            "extra": list(self.extra),
            ALGORITHM: dict(self.digests or {}),
        }
        return {_KEY: json.dumps(body)}

    @classmethod
    def of_header(cls, header: Header) -> Notes:
        """What the file's notes say.

        Raises:
            CheckpointError: it is not a snapshot, or of another version.
        """
        text = header.metadata.get(_KEY)
        if text is None:
            raise fault(header.path, "it is not a snapshot: use load_into for a checkpoint")
        body = parse_object(header.path, text.encode(), "snapshot notes")
        version = body.get("version")
        if version not in (_WITHOUT_DIGESTS, _VERSION):
            known = f"{_WITHOUT_DIGESTS} or {_VERSION}"
            raise fault(header.path, f"its snapshot version is {brief(version)}, not {known}")
        if not _is_body(body):
            raise fault(header.path, "its snapshot notes are not what a snapshot has")
        strides = {name: tuple(numbers) for name, numbers in body["strides"].items()}
        digests = None if version == _WITHOUT_DIGESTS else _digests(header, body)
        notes = cls(body["module"], body["ties"], strides, tuple(body["extra"]), digests)
        for tied, name in notes.ties.items():
            if name not in header.tensors or tied in header.tensors:
                raise fault(header.path, f"its notes tie {brief(tied)} to {brief(name)} wrongly")
        return notes


def _is_body(body: dict[str, Any]) -> bool:
    ties, strides, extra = body.get("ties"), body.get("strides"), body.get("extra")
    return (
        isinstance(body.get("module"), str)
        and isinstance(ties, dict)
        and all(isinstance(name, str) for name in ties.values())
        and isinstance(strides, dict)
        and all(_are_strides(numbers) for numbers in strides.values())
        and isinstance(extra, list)
        and all(isinstance(name, str) for name in extra)
    )


def _digests(header: Header, body: dict[str, Any]) -> dict[str, str]:
    """One for each tensor of the file, or it is no snapshot."""
    digests = body.get(ALGORITHM)
    if not isinstance(digests, dict) or digests.keys() != header.tensors.keys():
        raise fault(header.path, f"its snapshot notes have not one {ALGORITHM} for each tensor")
    if not all(isinstance(text, str) and len(text) == DIGITS for text in digests.values()):
        raise fault(header.path, f"its snapshot notes have a {ALGORITHM} that is none")
    return digests


def _are_strides(value: Any) -> bool:
    return isinstance(value, list) and all(type(number) is int for number in value)


def distinct(tensors: Mapping[str, torch.Tensor]) -> tuple[dict[str, torch.Tensor], dict[str, str]]:
    """One name for each tensor, and the other names with the one they share a tensor with."""
    first: dict[tuple[object, ...], str] = {}
    kept: dict[str, torch.Tensor] = {}
    ties: dict[str, str] = {}
    for name, tensor in tensors.items():
        place = place_of(tensor) if tensor.numel() and has_memory(tensor) else (name,)
        if place in first:
            ties[name] = first[place]
        else:
            first[place], kept[name] = name, tensor
    return kept, ties


def strides_of(tensor: torch.Tensor) -> tuple[int, ...] | None:
    """Its strides where it is not row-major; of a length of 1 they mean nothing and are 0."""
    if tensor.is_contiguous():
        return None
    pairs = zip(tensor.stride(), tensor.shape, strict=True)
    return tuple(int(stride) if size > 1 else 0 for stride, size in pairs)


def header_bytes(tensors: Mapping[str, torch.Tensor], notes: Notes) -> bytes:
    """Length prefix and header of a file of these tensors, one after the other."""
    fields: dict[str, Any] = {"__metadata__": notes.to_metadata()}
    at = 0
    for name, tensor in tensors.items():
        end = at + tensor.numel() * tensor.element_size()
        fields[name] = {
            "dtype": file_dtype(tensor),
            "shape": list(file_shape(tensor)),
            "data_offsets": [at, end],
        }
        at = end
    text = json.dumps(fields, ensure_ascii=False).encode()
    text += b" " * (-len(text) % _ALIGNMENT)
    return len(text).to_bytes(8, "little") + text


def in_file_order(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Wide types first, so that each tensor starts at a multiple of its type's size."""
    return dict(sorted(tensors.items(), key=lambda pair: (-pair[1].element_size(), pair[0])))
