// Which driver calls does cumem make, and where do they come from?
//
// One list, one table. The table is filled from a shared library named at run
// time, so nothing links to libcuda and the emulator is found the same way.
//
// Note [Symbol names]: cuda.h renames many calls with macros (cuMemHostRegister
// is cuMemHostRegister_v2). The list below is expanded by the preprocessor
// before a name is stringised, so the symbol that is looked up is always the
// one whose prototype this header has. Stringising the bare name would silently
// bind the old 32-bit ABI.
#pragma once

#include <cuda.h>

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>

#include "core/status.h"

// From CUDA 12.8 on the driver takes many copies in one call; 13.0 changed its parameters.
#define CUMEM_HAS_BATCHES (CUDA_VERSION >= 12080)
#if CUMEM_HAS_BATCHES
#define CUMEM_BATCH_CALLS(OPTIONAL) OPTIONAL(cuMemcpyBatchAsync)
#else
#define CUMEM_BATCH_CALLS(OPTIONAL)
#endif

// REQUIRED: a driver without one of these cannot be used (Status names it).
// OPTIONAL: null where the driver is too old; the feature is absent.
#define CUMEM_DRIVER_CALLS(REQUIRED, OPTIONAL) \
  REQUIRED(cuInit)                             \
  REQUIRED(cuDriverGetVersion)                 \
  REQUIRED(cuGetErrorName)                     \
  REQUIRED(cuDeviceGetCount)                   \
  REQUIRED(cuDeviceGet)                        \
  REQUIRED(cuDeviceGetName)                    \
  REQUIRED(cuDeviceGetAttribute)               \
  REQUIRED(cuDeviceTotalMem)                   \
  REQUIRED(cuDevicePrimaryCtxRetain)           \
  REQUIRED(cuDevicePrimaryCtxRelease)          \
  REQUIRED(cuCtxGetCurrent)                    \
  REQUIRED(cuCtxPushCurrent)                   \
  REQUIRED(cuCtxPopCurrent)                    \
  REQUIRED(cuCtxSynchronize)                   \
  REQUIRED(cuMemGetInfo)                       \
  REQUIRED(cuMemGetAllocationGranularity)      \
  REQUIRED(cuMemAddressReserve)                \
  REQUIRED(cuMemAddressFree)                   \
  REQUIRED(cuMemCreate)                        \
  REQUIRED(cuMemRelease)                       \
  REQUIRED(cuMemMap)                           \
  REQUIRED(cuMemUnmap)                         \
  REQUIRED(cuMemSetAccess)                     \
  REQUIRED(cuMemGetAccess)                     \
  REQUIRED(cuMemRetainAllocationHandle)        \
  REQUIRED(cuMemHostRegister)                  \
  REQUIRED(cuMemHostUnregister)                \
  REQUIRED(cuMemcpyDtoHAsync)                  \
  REQUIRED(cuMemcpyHtoDAsync)                  \
  REQUIRED(cuMemsetD8Async)                    \
  REQUIRED(cuStreamCreate)                     \
  REQUIRED(cuStreamDestroy)                    \
  REQUIRED(cuStreamSynchronize)                \
  REQUIRED(cuStreamIsCapturing)                \
  REQUIRED(cuStreamWaitEvent)                  \
  REQUIRED(cuThreadExchangeStreamCaptureMode)  \
  REQUIRED(cuEventCreate)                      \
  REQUIRED(cuEventRecord)                      \
  REQUIRED(cuEventQuery)                       \
  REQUIRED(cuEventSynchronize)                 \
  REQUIRED(cuEventDestroy)                     \
  OPTIONAL(cuDeviceCanAccessPeer)              \
  OPTIONAL(cuDeviceGetPCIBusId)                \
  OPTIONAL(cuMemExportToShareableHandle)       \
  OPTIONAL(cuModuleLoadData)                   \
  OPTIONAL(cuModuleUnload)                     \
  OPTIONAL(cuModuleGetFunction)                \
  OPTIONAL(cuLaunchKernel)                     \
  CUMEM_BATCH_CALLS(OPTIONAL)

namespace cumem {

// The book of what the driver gave and what it took back. Counted by the owners
// in handles.h, so that "nothing leaked" is an equation and not a belief.
struct Ledger {
  std::atomic<std::uint64_t> handles_created{0};
  std::atomic<std::uint64_t> handles_released{0};
  std::atomic<std::uint64_t> physical_bytes{0};    // created and not released
  std::atomic<std::uint64_t> mappings{0};          // live
  std::atomic<std::uint64_t> reservations{0};      // live
  std::atomic<std::uint64_t> reserved_bytes{0};    // live
  std::atomic<std::uint64_t> registered_bytes{0};  // host memory pinned for the device, live
  // What the driver refused to take back. It is never touched or reused again.
  std::atomic<std::uint64_t> refused{0};
  std::atomic<std::uint64_t> refused_bytes{0};
  std::atomic<std::uint64_t> refused_handles{0};  // of those, physical memory
  std::atomic<int> last_refusal{0};               // its CUresult
};

class Driver {
 public:
  // Fills a table from the shared library at `path` and initialises it.
  // On failure `out` is empty; the Status names the missing call, or says why
  // the library could not be opened (then `detail` holds the loader's text).
  static Status load(const std::string& path, std::unique_ptr<Driver>& out, std::string& detail);

  ~Driver();
  Driver(const Driver&) = delete;
  Driver& operator=(const Driver&) = delete;

#define CUMEM_MEMBER(name) decltype(&::name) name = nullptr;
  CUMEM_DRIVER_CALLS(CUMEM_MEMBER, CUMEM_MEMBER)
#undef CUMEM_MEMBER

  Ledger& ledger() const noexcept { return ledger_; }
  const std::string& path() const noexcept { return path_; }
  int version() const noexcept { return version_; }
  const char* error_name(CUresult code) const noexcept;

  // Books a refusal: see Ledger.
  void refuse(const Status& status) const noexcept;

 private:
  Driver() = default;
  Status bind(std::string& detail);

  void* library_ = nullptr;
  std::string path_;
  int version_ = 0;
  mutable Ledger ledger_;
};

}  // namespace cumem
