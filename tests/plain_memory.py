"""How does a tenant without cumem take device memory, and give it back?"""

from __future__ import annotations

import ctypes
from collections.abc import Callable

from cumem import _runtime

GRANULE = 2 << 20
CUDA_ERROR_OUT_OF_MEMORY = 2


class PlainMemory:
    """Memory that a tenant without cumem takes from the driver: an emulated one, or the real.

    A real driver needs some of what it calls free for itself: then it is that much less.
    """

    def __init__(self, machine: int | None, size: int) -> None:
        real = machine is None
        self._driver = ctypes.CDLL("libcuda.so.1" if real else _runtime.emulator_library())
        self._device = 0 if machine is None else machine * 64
        self._size = size
        self.parts: list[tuple[int, int]] = []  # address and bytes

    def __enter__(self) -> PlainMemory:
        self._under_context(self._take)
        return self

    def __exit__(self, *error: object) -> None:
        self._under_context(self._give_back)

    def _take(self) -> int:
        left = part = self._size
        while part >= GRANULE:
            address = ctypes.c_uint64()
            code = self._driver.cuMemAlloc_v2(ctypes.byref(address), ctypes.c_size_t(part))
            if code == 0:
                self.parts.append((address.value, part))
                left -= part
            elif code == CUDA_ERROR_OUT_OF_MEMORY:
                part = part // 2 // GRANULE * GRANULE
            else:
                return int(code)
            part = min(part, left // GRANULE * GRANULE)
        return 0

    def _give_back(self) -> int:
        codes = [self._driver.cuMemFree_v2(ctypes.c_uint64(address)) for address, _ in self.parts]
        return max(codes, default=0)

    def _under_context(self, call: Callable[[], int]) -> None:
        context = ctypes.c_void_p()
        assert self._driver.cuDevicePrimaryCtxRetain(ctypes.byref(context), self._device) == 0
        try:
            assert self._driver.cuCtxPushCurrent_v2(context) == 0
            code = call()
            assert self._driver.cuCtxPopCurrent_v2(ctypes.byref(context)) == 0
            assert code == 0, f"CUDA error {code}"
        finally:
            self._driver.cuDevicePrimaryCtxRelease_v2(self._device)
