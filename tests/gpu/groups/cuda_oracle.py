"""What does the driver itself say, asked through cuda-python and not through cumem?"""

from __future__ import annotations

from typing import Any

from cuda.bindings import driver

_ATTRIBUTE = driver.CUpointer_attribute
_DEVICE_ATTRIBUTE = driver.CUdevice_attribute


def ask(answer: tuple[Any, ...]) -> Any:
    """The value of a call of cuda-python, or AssertionError with the driver's code."""
    code, *values = answer
    if code != driver.CUresult.CUDA_SUCCESS:
        raise AssertionError(f"the driver answered {code.name}")
    return values[0] if len(values) == 1 else tuple(values)


def prepare(ordinal: int = 0) -> None:
    """Makes the primary context of a device current where this thread has none."""
    ask(driver.cuInit(0))
    if current_context() == 0:
        primary = ask(driver.cuDevicePrimaryCtxRetain(ask(driver.cuDeviceGet(ordinal))))
        ask(driver.cuCtxPushCurrent(primary))


def current_context() -> int:
    """The context that is current on this thread; 0: none."""
    return int(ask(driver.cuCtxGetCurrent()))


def free_bytes() -> int:
    """Free memory of the device whose context is current."""
    return int(ask(driver.cuMemGetInfo())[0])


def is_mapped(address: int) -> bool:
    """Is there memory at ``address``?"""
    code, value = driver.cuPointerGetAttribute(_ATTRIBUTE.CU_POINTER_ATTRIBUTE_MAPPED, address)
    return code == driver.CUresult.CUDA_SUCCESS and bool(value)


def reservation(address: int) -> tuple[int, int] | None:
    """Start and bytes of the address range around ``address``; None when the driver won't say."""
    name = _ATTRIBUTE.CU_POINTER_ATTRIBUTE_RANGE_START_ADDR
    code, start = driver.cuPointerGetAttribute(name, address)
    if code != driver.CUresult.CUDA_SUCCESS:
        return None
    size = ask(driver.cuPointerGetAttribute(_ATTRIBUTE.CU_POINTER_ATTRIBUTE_RANGE_SIZE, address))
    return int(start), int(size)


def address_range(address: int) -> tuple[int, int]:
    """Start and bytes that ``cuMemGetAddressRange`` tells."""
    start, size = ask(driver.cuMemGetAddressRange(address))
    return int(start), int(size)


def is_rdma_capable(address: int) -> bool:
    """May other devices on the bus reach the memory at ``address``?"""
    name = _ATTRIBUTE.CU_POINTER_ATTRIBUTE_IS_GPU_DIRECT_RDMA_CAPABLE
    return bool(ask(driver.cuPointerGetAttribute(name, address)))


def has_handle(address: int) -> bool:
    """Is there a physical allocation behind ``address``, mapped by cuMemMap?"""
    code, handle = driver.cuMemRetainAllocationHandle(address)
    if code != driver.CUresult.CUDA_SUCCESS:
        return False
    ask(driver.cuMemRelease(handle))
    return True


def home_of(address: int) -> int:
    """The ordinal of the device that the memory at ``address`` is on."""
    return int(_properties(address).location.id)


def has_posix_handle(address: int) -> bool:
    """Can the memory at ``address`` be shared by file descriptor?"""
    wanted = driver.CUmemAllocationHandleType.CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR
    return bool(int(_properties(address).requestedHandleTypes) & int(wanted))


def access_from(ordinal: int, address: int) -> str:
    """What a device may do at ``address``: NONE, READ or READWRITE."""
    place = driver.CUmemLocation()
    place.type = driver.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
    place.id = ordinal
    flags = driver.CUmemAccess_flags(int(ask(driver.cuMemGetAccess(place, address))))
    return str(flags.name).rpartition("_")[2]


def read(address: int, count: int) -> bytes:
    """Bytes of device memory."""
    buffer = bytearray(count)
    ask(driver.cuMemcpyDtoH(buffer, address, count))
    return bytes(buffer)


def offers_rdma(ordinal: int = 0) -> bool:
    """Says the device that VMM memory may carry GPUDirect RDMA, and can it be made?"""
    name = _DEVICE_ATTRIBUTE.CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_WITH_CUDA_VMM_SUPPORTED
    device = ask(driver.cuDeviceGet(ordinal))
    code, value = driver.cuDeviceGetAttribute(name, device)
    if code != driver.CUresult.CUDA_SUCCESS or not value:
        return False
    return _can_create(_plain(ordinal, rdma=True))


def offers_posix_handles(ordinal: int = 0) -> bool:
    """Says the device that VMM memory can be shared by file descriptor?"""
    name = _DEVICE_ATTRIBUTE.CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED
    code, value = driver.cuDeviceGetAttribute(name, ask(driver.cuDeviceGet(ordinal)))
    return code == driver.CUresult.CUDA_SUCCESS and bool(value)


def new_stream() -> int:
    """The handle of a non-blocking stream that torch and cumem have never heard of."""
    flags = driver.CUstream_flags.CU_STREAM_NON_BLOCKING
    return int(ask(driver.cuStreamCreate(int(flags))))


def _properties(address: int) -> Any:
    handle = ask(driver.cuMemRetainAllocationHandle(address))
    found = ask(driver.cuMemGetAllocationPropertiesFromHandle(handle))
    ask(driver.cuMemRelease(handle))
    return found


def _plain(ordinal: int, *, rdma: bool) -> Any:
    wanted = driver.CUmemAllocationProp()
    wanted.type = driver.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
    wanted.location.type = driver.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
    wanted.location.id = ordinal
    wanted.allocFlags.gpuDirectRDMACapable = int(rdma)
    return wanted


def _can_create(wanted: Any) -> bool:
    granularity = driver.CUmemAllocationGranularity_flags.CU_MEM_ALLOC_GRANULARITY_MINIMUM
    size = ask(driver.cuMemGetAllocationGranularity(wanted, granularity))
    code, handle = driver.cuMemCreate(size, wanted, 0)
    if code != driver.CUresult.CUDA_SUCCESS:
        return False
    ask(driver.cuMemRelease(handle))
    return True
