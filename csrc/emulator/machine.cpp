#include "emulator/machine.h"

namespace cumem::emulator {
namespace {

std::optional<int> usual_attribute(int which) {
  switch (which) {
    case CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR:
      return 9;
    case CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR:
      return 0;
    case CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT:
      return 132;
    case CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED:
    case CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED:
    case CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_WITH_CUDA_VMM_SUPPORTED:
      return 1;
    case CU_DEVICE_ATTRIBUTE_HOST_NUMA_ID:
    case CU_DEVICE_ATTRIBUTE_INTEGRATED:
    case CU_DEVICE_ATTRIBUTE_CAN_USE_HOST_POINTER_FOR_REGISTERED_MEM:
      return 0;
    default:
      return std::nullopt;
  }
}

}  // namespace

CUdevice Device::value() const { return machine.index * kDevicesAtMost + ordinal; }

std::optional<int> Machine::attribute(int which) const {
  const auto found = attributes.find(which);
  if (found == attributes.end()) return usual_attribute(which);
  if (found->second == -1) return std::nullopt;
  return found->second;
}

}  // namespace cumem::emulator
