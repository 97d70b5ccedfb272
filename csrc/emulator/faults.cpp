#include "emulator/faults.h"

#include <algorithm>
#include <iterator>

namespace cumem::emulator {
namespace {

constexpr std::string_view kCalls[] = {
    "cuCtxGetCurrent",
    "cuCtxPopCurrent",
    "cuCtxPushCurrent",
    "cuCtxSynchronize",
    "cuDeviceCanAccessPeer",
    "cuDeviceGet",
    "cuDeviceGetAttribute",
    "cuDeviceGetCount",
    "cuDeviceGetName",
    "cuDeviceGetPCIBusId",
    "cuDevicePrimaryCtxRelease",
    "cuDevicePrimaryCtxRetain",
    "cuDeviceTotalMem",
    "cuDriverGetVersion",
    "cuEventCreate",
    "cuEventDestroy",
    "cuEventQuery",
    "cuEventRecord",
    "cuEventSynchronize",
    "cuGetErrorName",
    "cuInit",
    "cuLaunchKernel",
    "cuMemAddressFree",
    "cuMemAddressReserve",
    "cuMemAlloc",
    "cuMemCreate",
    "cuMemExportToShareableHandle",
    "cuMemFree",
    "cuMemGetAccess",
    "cuMemGetAddressRange",
    "cuMemGetAllocationGranularity",
    "cuMemGetInfo",
    "cuMemHostRegister",
    "cuMemHostUnregister",
    "cuMemMap",
    "cuMemRelease",
    "cuMemRetainAllocationHandle",
    "cuMemSetAccess",
    "cuMemUnmap",
    "cuMemcpyBatchAsync",
    "cuMemcpyDtoH",
    "cuMemcpyDtoHAsync",
    "cuMemcpyHtoD",
    "cuMemcpyHtoDAsync",
    "cuMemsetD8Async",
    "cuModuleGetFunction",
    "cuModuleLoadData",
    "cuModuleUnload",
    "cuPointerGetAttribute",
    "cuStreamBeginCapture",
    "cuStreamCreate",
    "cuStreamDestroy",
    "cuStreamEndCapture",
    "cuStreamIsCapturing",
    "cuStreamQuery",
    "cuStreamSynchronize",
    "cuStreamWaitEvent",
    "cuThreadExchangeStreamCaptureMode",
};

}  // namespace

bool is_call(std::string_view name) {
  return std::binary_search(std::begin(kCalls), std::end(kCalls), name);
}

void Faults::add(std::string_view name, long nth, CUresult code) {
  Record& record = records_[std::string(name)];
  record.rules.push_back({record.count + nth, code});
}

void Faults::clear() {
  for (auto& [name, record] : records_) record.rules.clear();
}

long Faults::count(std::string_view name) const {
  const auto found = records_.find(name);
  return found == records_.end() ? 0 : found->second.count;
}

CUresult Faults::on_call(std::string_view name) {
  Record& record = records_[std::string(name)];
  ++record.count;
  const auto fires = [&](const Rule& rule) { return rule.at == record.count; };
  const auto rule = std::find_if(record.rules.begin(), record.rules.end(), fires);
  if (rule == record.rules.end()) return CUDA_SUCCESS;
  const CUresult code = rule->code;
  record.rules.erase(std::remove_if(record.rules.begin(), record.rules.end(), fires),
                     record.rules.end());
  return code;
}

}  // namespace cumem::emulator
