// The driver calls about virtual memory: reservations, physical memory, mappings.

#include <algorithm>
#include <vector>

#include "emulator/allocate.h"
#include "emulator/call.h"

namespace cumem::emulator {
namespace {

bool is_power_of_two(std::size_t value) { return value != 0 && (value & (value - 1)) == 0; }

CUresult check_location(World& world, const CUmemLocation& location) {
  if (location.type != CU_MEM_LOCATION_TYPE_DEVICE) return CUDA_ERROR_INVALID_VALUE;
  return world.device(location.id) == nullptr ? CUDA_ERROR_INVALID_DEVICE : CUDA_SUCCESS;
}

bool has(const Machine& machine, CUdevice_attribute attribute) {
  return machine.attribute(attribute).value_or(0) == 1;
}

bool supports(const Machine& machine, const CUmemAllocationProp& prop) {
  const bool wants_fd = prop.requestedHandleTypes == CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR;
  if (!wants_fd && prop.requestedHandleTypes != CU_MEM_HANDLE_TYPE_NONE) return false;
  if (wants_fd && !has(machine, CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED)) {
    return false;
  }
  const auto& flags = prop.allocFlags;
  if (flags.compressionType != 0 || flags.usage != 0) return false;
  return flags.gpuDirectRDMACapable == 0 ||
         has(machine, CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_WITH_CUDA_VMM_SUPPORTED);
}

CUresult check_prop(World& world, const CUmemAllocationProp* prop) {
  if (prop == nullptr || prop->type != CU_MEM_ALLOCATION_TYPE_PINNED) {
    return CUDA_ERROR_INVALID_VALUE;
  }
  const CUresult located = check_location(world, prop->location);
  if (located != CUDA_SUCCESS) return located;
  const Machine& machine = world.device(prop->location.id)->machine;
  if (!has(machine, CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED)) {
    return CUDA_ERROR_NOT_SUPPORTED;
  }
  return supports(machine, *prop) ? CUDA_SUCCESS : CUDA_ERROR_NOT_SUPPORTED;
}

// Access can be given to devices of the memory's machine.
CUresult check_accesses(const Session& session, const CUmemAccessDesc* wanted, std::size_t count) {
  if (wanted == nullptr || count == 0) return CUDA_ERROR_INVALID_VALUE;
  for (std::size_t i = 0; i < count; ++i) {
    const CUresult located = check_location(session.world, wanted[i].location);
    if (located != CUDA_SUCCESS) return located;
    const Device& device = *session.world.device(wanted[i].location.id);
    if (&device.machine != session.machine) return CUDA_ERROR_INVALID_DEVICE;
    const CUmemAccess_flags flags = wanted[i].flags;
    if (flags != CU_MEM_ACCESS_FLAGS_PROT_NONE && flags != CU_MEM_ACCESS_FLAGS_PROT_READ &&
        flags != CU_MEM_ACCESS_FLAGS_PROT_READWRITE) {
      return CUDA_ERROR_INVALID_VALUE;
    }
  }
  return CUDA_SUCCESS;
}

CUresult map(World& world, const Range& range, CUmemGenericAllocationHandle id) {
  const auto found = world.handles.find(id);
  if (found == world.handles.end() || !aligned(range)) return CUDA_ERROR_INVALID_VALUE;
  const std::shared_ptr<Physical>& physical = found->second.physical;
  if (range.bytes > physical->extent.bytes()) return CUDA_ERROR_INVALID_VALUE;
  const Reservation* const home = world.addresses.reservation_at(range.begin);
  if (home == nullptr || home->use == Use::kPlain) return CUDA_ERROR_INVALID_VALUE;
  return world.addresses.map(range, physical);
}

// Does the range start in memory that belongs to the calls of this file?
bool is_virtual(const World& world, const Range& range) {
  const Reservation* const home = world.addresses.reservation_at(range.begin);
  return home != nullptr && home->use == Use::kVirtualMemory;
}

CUresult retain(World& world, std::uintptr_t address, CUmemGenericAllocationHandle* id) {
  const Mapping* const mapping = world.addresses.mapping_at(address);
  if (mapping == nullptr || !is_virtual(world, {address, 1})) return CUDA_ERROR_INVALID_VALUE;
  const std::shared_ptr<Physical>& physical = mapping->physical;
  ++world.handles.emplace(physical->id, Handle{physical, 0}).first->second.references;
  *id = physical->id;
  return CUDA_SUCCESS;
}

}  // namespace
}  // namespace cumem::emulator

using namespace cumem::emulator;

CUresult CUDAAPI cuMemGetAllocationGranularity(size_t* granularity, const CUmemAllocationProp* prop,
                                               CUmemAllocationGranularity_flags option) {
  const Subject subject = prop == nullptr ? Subject::process() : Subject::device(prop->location.id);
  return guarded({"cuMemGetAllocationGranularity", subject, kQuery}, [&](Session& session) {
    const CUresult checked = check_prop(session.world, prop);
    if (checked != CUDA_SUCCESS) return checked;
    const bool known = option == CU_MEM_ALLOC_GRANULARITY_MINIMUM ||
                       option == CU_MEM_ALLOC_GRANULARITY_RECOMMENDED;
    if (granularity == nullptr || !known) return CUDA_ERROR_INVALID_VALUE;
    *granularity = kGranularity;
    return CUDA_SUCCESS;
  });
}

CUresult CUDAAPI cuMemAddressReserve(CUdeviceptr* pointer, size_t bytes, size_t alignment,
                                     CUdeviceptr hint, unsigned long long flags) {
  return guarded({"cuMemAddressReserve", Subject::context(), kMemory}, [&](Session& session) {
    if (pointer == nullptr || flags != 0) return CUDA_ERROR_INVALID_VALUE;
    if (bytes == 0 || bytes % kGranularity != 0) return CUDA_ERROR_INVALID_VALUE;
    if (alignment != 0 && !is_power_of_two(alignment)) return CUDA_ERROR_INVALID_VALUE;
    const Placement placement{bytes, std::max(alignment, kGranularity), hint};
    std::uintptr_t begin = 0;
    const CUresult reserved =
        session.world.addresses.reserve(placement, *session.machine, Use::kVirtualMemory, &begin);
    if (reserved == CUDA_SUCCESS) *pointer = begin;
    return reserved;
  });
}

CUresult CUDAAPI cuMemAddressFree(CUdeviceptr pointer, size_t bytes) {
  return guarded({"cuMemAddressFree", Subject::address(pointer), kMemory}, [&](Session& session) {
    const Range range{pointer, bytes};
    if (!is_virtual(session.world, range)) return CUDA_ERROR_INVALID_VALUE;
    return session.world.addresses.release(range);
  });
}

CUresult CUDAAPI cuMemCreate(CUmemGenericAllocationHandle* handle, size_t bytes,
                             const CUmemAllocationProp* prop, unsigned long long flags) {
  const Subject subject = prop == nullptr ? Subject::process() : Subject::device(prop->location.id);
  return guarded({"cuMemCreate", subject, kMemory}, [&](Session& session) {
    if (handle == nullptr || flags != 0) return CUDA_ERROR_INVALID_VALUE;
    if (bytes == 0 || bytes % kGranularity != 0) return CUDA_ERROR_INVALID_VALUE;
    const CUresult checked = check_prop(session.world, prop);
    if (checked != CUDA_SUCCESS) return checked;
    std::shared_ptr<Physical> physical;
    Device& device = *session.world.device(prop->location.id);
    const CUresult created = create_physical(session, device, {*prop, bytes}, &physical);
    if (created != CUDA_SUCCESS) return created;
    const CUmemGenericAllocationHandle id = physical->id;
    session.world.handles.emplace(id, Handle{std::move(physical), 1});
    *handle = id;
    return CUDA_SUCCESS;
  });
}

CUresult CUDAAPI cuMemRelease(CUmemGenericAllocationHandle handle) {
  return guarded({"cuMemRelease", Subject::handle(handle), kMemory}, [&](Session& session) {
    auto& handles = session.world.handles;
    const auto found = handles.find(handle);
    if (found == handles.end()) return CUDA_ERROR_INVALID_VALUE;
    if (--found->second.references == 0) handles.erase(found);
    return CUDA_SUCCESS;
  });
}

CUresult CUDAAPI cuMemRetainAllocationHandle(CUmemGenericAllocationHandle* handle, void* address) {
  const auto pointer = reinterpret_cast<CUdeviceptr>(address);
  return guarded({"cuMemRetainAllocationHandle", Subject::address(pointer), kOnObject},
                 [&](Session& session) {
                   if (handle == nullptr) return CUDA_ERROR_INVALID_VALUE;
                   return retain(session.world, pointer, handle);
                 });
}

CUresult CUDAAPI cuMemExportToShareableHandle(void*, CUmemGenericAllocationHandle handle,
                                              CUmemAllocationHandleType, unsigned long long) {
  return guarded({"cuMemExportToShareableHandle", Subject::handle(handle), kOnObject},
                 [&](Session&) { return CUDA_ERROR_NOT_SUPPORTED; });
}

CUresult CUDAAPI cuMemMap(CUdeviceptr pointer, size_t bytes, size_t offset,
                          CUmemGenericAllocationHandle handle, unsigned long long flags) {
  return guarded({"cuMemMap", Subject::handle(handle), kMemory}, [&](Session& session) {
    if (offset != 0 || flags != 0) return CUDA_ERROR_INVALID_VALUE;
    return map(session.world, {pointer, bytes}, handle);
  });
}

CUresult CUDAAPI cuMemUnmap(CUdeviceptr pointer, size_t bytes) {
  return guarded({"cuMemUnmap", Subject::address(pointer), kMemory}, [&](Session& session) {
    const Range range{pointer, bytes};
    session.world.wait_until_still(session.lock, range);
    if (!is_virtual(session.world, range)) return CUDA_ERROR_INVALID_VALUE;
    return session.world.addresses.unmap(range);
  });
}

CUresult CUDAAPI cuMemSetAccess(CUdeviceptr pointer, size_t bytes, const CUmemAccessDesc* wanted,
                                size_t count) {
  return guarded({"cuMemSetAccess", Subject::address(pointer), kMemory}, [&](Session& session) {
    const Range range{pointer, bytes};
    const CUresult checked = check_accesses(session, wanted, count);
    if (checked != CUDA_SUCCESS) return checked;
    session.world.wait_until_still(session.lock, range);
    if (!is_virtual(session.world, range)) return CUDA_ERROR_INVALID_VALUE;
    return session.world.addresses.set_access(range, {wanted, wanted + count});
  });
}

CUresult CUDAAPI cuMemGetAccess(unsigned long long* flags, const CUmemLocation* location,
                                CUdeviceptr pointer) {
  return guarded({"cuMemGetAccess", Subject::address(pointer), kQuery}, [&](Session& session) {
    if (flags == nullptr || location == nullptr) return CUDA_ERROR_INVALID_VALUE;
    const CUresult checked = check_location(session.world, *location);
    if (checked != CUDA_SUCCESS) return checked;
    const Mapping* const mapping = session.world.addresses.mapping_at(pointer);
    if (mapping == nullptr) return CUDA_ERROR_INVALID_VALUE;
    const auto access = mapping->access.find(location->id);
    *flags = access == mapping->access.end() ? CU_MEM_ACCESS_FLAGS_PROT_NONE : access->second;
    return CUDA_SUCCESS;
  });
}
