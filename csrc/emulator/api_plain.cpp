// The driver calls about plain device memory and about what is free.

#include "emulator/allocate.h"
#include "emulator/call.h"

namespace cumem::emulator {
namespace {

// Like the driver, waits for all work of the device first.
CUresult free_when_idle(Session& session, std::uintptr_t begin) {
  World& world = session.world;
  const Mapping* const mapping = world.addresses.mapping_at(begin);
  if (mapping == nullptr) return CUDA_ERROR_INVALID_VALUE;
  const Range range = mapping->range;
  const Context& owner = mapping->physical->device.context;
  const CUresult waited = wait_for(world, session.lock, everything_in(owner), owner);
  if (waited != CUDA_SUCCESS) return waited;
  world.wait_until_still(session.lock, range);
  return free_plain(world, begin);
}

}  // namespace
}  // namespace cumem::emulator

using namespace cumem::emulator;

CUresult CUDAAPI cuMemGetInfo(size_t* free, size_t* total) {
  return guarded({"cuMemGetInfo", Subject::context(), kUnderContext}, [&](Session& session) {
    if (free == nullptr || total == nullptr) return CUDA_ERROR_INVALID_VALUE;
    const Backing& backing = session.context->device.backing;
    *total = backing.capacity();
    *free = backing.capacity() - backing.used();
    return CUDA_SUCCESS;
  });
}

CUresult CUDAAPI cuMemAlloc(CUdeviceptr* pointer, size_t bytes) {
  const Call call{"cuMemAlloc", Subject::context(), kUnderContext | kUnsafe};
  return guarded(call, [&](Session& session) {
    if (pointer == nullptr || bytes == 0) return CUDA_ERROR_INVALID_VALUE;
    const std::size_t rounded = (bytes + kGranularity - 1) & ~(kGranularity - 1);
    if (rounded < bytes) return CUDA_ERROR_OUT_OF_MEMORY;
    std::uintptr_t begin = 0;
    const CUresult made = allocate_plain(session, session.context->device, rounded, &begin);
    if (made == CUDA_SUCCESS) *pointer = begin;
    return made;
  });
}

CUresult CUDAAPI cuMemFree(CUdeviceptr pointer) {
  const Call call{"cuMemFree", Subject::address(pointer), kUnderContext | kUnsafe};
  return guarded(call, [&](Session& session) {
    return pointer == 0 ? CUDA_SUCCESS : free_when_idle(session, pointer);
  });
}
