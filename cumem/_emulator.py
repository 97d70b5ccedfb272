"""How does Python steer the emulated driver? Through its C control functions."""

from __future__ import annotations

import ctypes
from functools import cache
from typing import Any

from cumem import _runtime

_LEDGER_FIELDS = (
    "handles",
    "handle_bytes",
    "mappings",
    "mapped_bytes",
    "reservations",
    "reserved_bytes",
    "host_registrations",
    "registered_bytes",
    "streams",
    "events",
    "plain_allocations",
    "plain_bytes",
    "contexts_retained",
    "pending_work",
    "handle_references",
    "captures",
    "dead_contexts",
    "modules",
)

# The CUresults that tests ask for, by name (cuda.h).
_CODES = {
    "CUDA_SUCCESS": 0,
    "CUDA_ERROR_INVALID_VALUE": 1,
    "CUDA_ERROR_OUT_OF_MEMORY": 2,
    "CUDA_ERROR_NOT_INITIALIZED": 3,
    "CUDA_ERROR_DEINITIALIZED": 4,
    "CUDA_ERROR_INVALID_DEVICE": 101,
    "CUDA_ERROR_INVALID_CONTEXT": 201,
    "CUDA_ERROR_ECC_UNCORRECTABLE": 214,
    "CUDA_ERROR_INVALID_HANDLE": 400,
    "CUDA_ERROR_NOT_READY": 600,
    "CUDA_ERROR_ILLEGAL_ADDRESS": 700,
    "CUDA_ERROR_LAUNCH_FAILED": 719,
    "CUDA_ERROR_NOT_PERMITTED": 800,
    "CUDA_ERROR_NOT_SUPPORTED": 801,
    "CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED": 900,
    "CUDA_ERROR_UNKNOWN": 999,
}


class _Ledger(ctypes.Structure):
    _fields_ = [(name, ctypes.c_uint64) for name in _LEDGER_FIELDS]


_INT, _LONG, _U64, _PTR = ctypes.c_int, ctypes.c_long, ctypes.c_uint64, ctypes.c_void_p

# name: (result, arguments), as csrc/emulator/control.h declares them
_SIGNATURES: dict[str, tuple[Any, tuple[Any, ...]]] = {
    "create": (_INT, (_U64, _INT)),
    "select": (_INT, (_INT,)),
    "set_attribute": (_INT, (_INT, _INT, _INT)),
    "set_bandwidth": (_INT, (_INT, _U64)),
    "set_latency": (_INT, (_INT, _U64)),
    "set_host_limit": (_INT, (_INT, _U64)),
    "set_host_refusal": (_INT, (_INT, _INT)),
    "fail": (_INT, (_INT, ctypes.c_char_p, _LONG, _INT)),
    "clear": (_INT, (_INT,)),
    "call_count": (_LONG, (_INT, ctypes.c_char_p)),
    "poison": (_INT, (_INT, _INT, _INT)),
    "used_bytes": (_U64, (_INT, _INT)),
    "stream_create": (_PTR, (_INT, _INT, _INT)),
    "stream_of": (_PTR, (_INT, _INT)),
    "stream_destroy": (_INT, (_PTR,)),
    "enqueue_write": (_INT, (_INT, _PTR, _U64, _PTR, _U64, _U64)),
    "enqueue_read": (_INT, (_INT, _PTR, _U64, _PTR, _U64, _U64)),
    "enqueue_delay": (_INT, (_INT, _PTR, _U64)),
    "begin_capture": (_INT, (_PTR,)),
    "end_capture": (_INT, (_PTR,)),
}


class Library:
    """The control functions of csrc/emulator/control.h, without their prefix."""

    def __init__(self, path: str) -> None:
        self._loaded = ctypes.CDLL(path)
        for name, (result, arguments) in _SIGNATURES.items():
            function = getattr(self._loaded, f"cumem_emulator_{name}")
            function.restype, function.argtypes = result, arguments
            setattr(self, name, function)

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(f"the emulator has no control function {name!r}")

    def ledger(self, machine: int) -> dict[str, int]:
        book = _Ledger()
        self._loaded.cumem_emulator_ledger(machine, ctypes.byref(book))
        return {name: int(getattr(book, name)) for name in _LEDGER_FIELDS}


@cache
def library() -> Library:
    return Library(_runtime.emulator_library())


def error_code(name: str) -> int:
    """The CUresult called ``name``.

    Raises:
        ValueError: an unknown name.
    """
    if name not in _CODES:
        raise ValueError(f"unknown CUresult {name!r}; choices: {', '.join(sorted(_CODES))}")
    return _CODES[name]
