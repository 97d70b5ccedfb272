// The driver calls that say what lies at an address.

#include "emulator/call.h"

namespace cumem::emulator {
namespace {

template <class Value>
CUresult answer(void* data, Value value) {
  *static_cast<Value*>(data) = value;
  return CUDA_SUCCESS;
}

CUresult about_host(void* data, CUpointer_attribute attribute, const Registration& registration) {
  switch (attribute) {
    case CU_POINTER_ATTRIBUTE_MEMORY_TYPE:
      return answer<unsigned>(data, CU_MEMORYTYPE_HOST);
    case CU_POINTER_ATTRIBUTE_CONTEXT:
      return answer(data, registration.context.id);
    case CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL:
      return answer(data, registration.context.device.value());
    case CU_POINTER_ATTRIBUTE_RANGE_START_ADDR:
      return answer<CUdeviceptr>(data, registration.range.begin);
    case CU_POINTER_ATTRIBUTE_RANGE_SIZE:
      return answer<std::size_t>(data, registration.range.bytes);
    default:
      return CUDA_ERROR_INVALID_VALUE;
  }
}

// The range is the reservation, mapped or not, as the driver has it.
CUresult about_device(void* data, CUpointer_attribute attribute, const Reservation& home,
                      const Mapping* mapping) {
  switch (attribute) {
    case CU_POINTER_ATTRIBUTE_RANGE_START_ADDR:
      return answer<CUdeviceptr>(data, home.addresses.range().begin);
    case CU_POINTER_ATTRIBUTE_RANGE_SIZE:
      return answer<std::size_t>(data, home.addresses.range().bytes);
    case CU_POINTER_ATTRIBUTE_MAPPED:
      return answer<int>(data, mapping != nullptr ? 1 : 0);
    default:
      break;
  }
  if (mapping == nullptr) return CUDA_ERROR_INVALID_VALUE;
  const Device& device = mapping->physical->device;
  switch (attribute) {
    case CU_POINTER_ATTRIBUTE_MEMORY_TYPE:
      return answer<unsigned>(data, CU_MEMORYTYPE_DEVICE);
    case CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL:
      return answer(data, device.value());
    case CU_POINTER_ATTRIBUTE_CONTEXT:
      return answer(data, home.use == Use::kPlain ? device.context.id : nullptr);
    case CU_POINTER_ATTRIBUTE_IS_MANAGED:
      return answer<unsigned>(data, 0);
    default:
      return CUDA_ERROR_INVALID_VALUE;
  }
}

const Registration* registration_at(const World& world, std::uintptr_t address) {
  for (const auto& [begin, registration] : world.hosts.all()) {
    if (registration.range.contains({address, 1})) return &registration;
  }
  return nullptr;
}

}  // namespace
}  // namespace cumem::emulator

using namespace cumem::emulator;

CUresult CUDAAPI cuPointerGetAttribute(void* data, CUpointer_attribute attribute,
                                       CUdeviceptr pointer) {
  const Call call{"cuPointerGetAttribute", Subject::address(pointer), kQuery};
  return guarded(call, [&](Session& session) {
    if (data == nullptr) return CUDA_ERROR_INVALID_VALUE;
    const World& world = session.world;
    if (const Reservation* home = world.addresses.reservation_at(pointer)) {
      return about_device(data, attribute, *home, world.addresses.mapping_at(pointer));
    }
    const Registration* const registration = registration_at(world, pointer);
    if (registration == nullptr) return CUDA_ERROR_INVALID_VALUE;
    return about_host(data, attribute, *registration);
  });
}

CUresult CUDAAPI cuMemGetAddressRange(CUdeviceptr* begin, size_t* bytes, CUdeviceptr pointer) {
  const Call call{"cuMemGetAddressRange", Subject::address(pointer), kQuery};
  return guarded(call, [&](Session& session) {
    const Mapping* const mapping = session.world.addresses.mapping_at(pointer);
    if (mapping == nullptr) return CUDA_ERROR_NOT_FOUND;
    if (begin != nullptr) *begin = mapping->range.begin;
    if (bytes != nullptr) *bytes = mapping->range.bytes;
    return CUDA_SUCCESS;
  });
}
