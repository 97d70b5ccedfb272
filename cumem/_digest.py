"""How does a device learn to compute digests of its own memory?

The kernel is compiled at run time with NVRTC, through cuda-python, for the
architecture at hand: neither the build nor the user needs nvcc. The result is kept
in the user's cache folder. It is loaded when the first pool of a device is made, not
during a sleep that is short of memory. Where any of this is not possible, sleeps copy
everything and their reports say so (``clean_check="never"``).
"""

from __future__ import annotations

import hashlib
import logging
import os
import tempfile
import threading
from pathlib import Path

import torch

from cumem import _C, options
from cumem._runtime import Runtime

_log = logging.getLogger("cumem")
_lock = threading.Lock()
_EMULATED_IMAGE = b"cumem emulated digest\0"


def load_once(runtime: Runtime, device: int) -> None:
    """Gives ``device`` its digest kernel; says in the log why it has none."""
    if device in runtime.digest_tried:
        return
    with _lock:
        if device in runtime.digest_tried:
            return
        runtime.digest_tried.add(device)
        try:
            image = _EMULATED_IMAGE if runtime.emulated else _image(device)
            runtime.allocator.load_digester(device, image)
        except (_C.StatusError, ImportError, OSError, RuntimeError) as error:
            name = runtime.device_name(device)
            _log.info("no digests on %s, every sleep copies everything: %s", name, str(error))


def _image(device: int) -> bytes:
    source = (Path(__file__).parent / "digest.cu").read_bytes()
    major, minor = torch.cuda.get_device_capability(device)
    name = f"digest-sm{major}{minor}-{hashlib.sha256(source).hexdigest()[:16]}.cubin"
    cached = options.cache_folder() / name
    if cached.is_file():
        return cached.read_bytes()
    image = _compile(source, f"sm_{major}{minor}")
    _store(cached, image)
    return image


def _compile(source: bytes, architecture: str) -> bytes:
    """The cubin of ``source``.

    Raises:
        ImportError: cuda-python is not installed. RuntimeError: NVRTC failed.
    """
    from cuda.bindings import nvrtc

    def must(result: tuple[object, ...]) -> tuple[object, ...]:
        if result[0] != nvrtc.nvrtcResult.NVRTC_SUCCESS:
            raise RuntimeError(f"NVRTC: {result[0]}")
        return result[1:]

    (program,) = must(nvrtc.nvrtcCreateProgram(source, b"digest.cu", 0, [], []))
    flags = [f"--gpu-architecture={architecture}".encode(), b"--std=c++17"]
    must(nvrtc.nvrtcCompileProgram(program, len(flags), flags))
    (length,) = must(nvrtc.nvrtcGetCUBINSize(program))
    assert isinstance(length, int)
    image = bytearray(length)
    must(nvrtc.nvrtcGetCUBIN(program, image))
    must(nvrtc.nvrtcDestroyProgram(program))
    return bytes(image)


def _store(path: Path, image: bytes) -> None:
    """Puts a file in place whole, readable by its owner only; a cache may fail."""
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        handle, name = tempfile.mkstemp(dir=path.parent)
        with os.fdopen(handle, "wb") as file:
            file.write(image)
        Path(name).replace(path)
    except OSError as error:
        _log.info("the digest kernel is not cached: %s", str(error))
