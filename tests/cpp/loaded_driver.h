// Which driver do the emulator's tests speak to?
//
// The one named by the program's first argument or by CUMEM_TEST_EMULATOR. It may be
// the real libcuda.so.1: then the tests of the driver's own rules say whether the
// emulator has them right, and those that need control.h are skipped.
#pragma once

#include <cuda.h>
#include <dlfcn.h>

#include <cstdlib>
#include <stdexcept>
#include <string>

#include "check.h"
#include "emulator/control.h"

// clang-format off
#define CUMEM_TEST_DRIVER_CALLS(CALL)     \
  CALL(cuInit)                            \
  CALL(cuDriverGetVersion)                \
  CALL(cuGetErrorName)                    \
  CALL(cuDeviceGetCount)                  \
  CALL(cuDeviceGet)                       \
  CALL(cuDeviceGetName)                   \
  CALL(cuDeviceGetAttribute)              \
  CALL(cuDeviceTotalMem)                  \
  CALL(cuDeviceCanAccessPeer)             \
  CALL(cuDeviceGetPCIBusId)               \
  CALL(cuDevicePrimaryCtxRetain)          \
  CALL(cuDevicePrimaryCtxRelease)         \
  CALL(cuCtxGetCurrent)                   \
  CALL(cuCtxPushCurrent)                  \
  CALL(cuCtxPopCurrent)                   \
  CALL(cuCtxSynchronize)                  \
  CALL(cuMemGetInfo)                      \
  CALL(cuMemGetAllocationGranularity)     \
  CALL(cuMemAddressReserve)               \
  CALL(cuMemAddressFree)                  \
  CALL(cuMemCreate)                       \
  CALL(cuMemRelease)                      \
  CALL(cuMemMap)                          \
  CALL(cuMemUnmap)                        \
  CALL(cuMemSetAccess)                    \
  CALL(cuMemGetAccess)                    \
  CALL(cuMemRetainAllocationHandle)       \
  CALL(cuMemExportToShareableHandle)      \
  CALL(cuMemHostRegister)                 \
  CALL(cuMemHostUnregister)               \
  CALL(cuMemcpyDtoHAsync)                 \
  CALL(cuMemcpyHtoDAsync)                 \
  CALL(cuMemsetD8Async)                   \
  CALL(cuMemcpyDtoH)                      \
  CALL(cuMemcpyHtoD)                      \
  CALL(cuMemAlloc)                        \
  CALL(cuMemFree)                         \
  CALL(cuMemGetAddressRange)              \
  CALL(cuPointerGetAttribute)             \
  CALL(cuStreamCreate)                    \
  CALL(cuStreamDestroy)                   \
  CALL(cuStreamSynchronize)               \
  CALL(cuStreamQuery)                     \
  CALL(cuStreamIsCapturing)               \
  CALL(cuStreamWaitEvent)                 \
  CALL(cuStreamBeginCapture)              \
  CALL(cuStreamEndCapture)                \
  CALL(cuThreadExchangeStreamCaptureMode) \
  CALL(cuEventCreate)                     \
  CALL(cuEventRecord)                     \
  CALL(cuEventQuery)                      \
  CALL(cuEventSynchronize)                \
  CALL(cuEventDestroy)                    \
  CALL(cuModuleLoadData)                  \
  CALL(cuModuleUnload)                    \
  CALL(cuModuleGetFunction)               \
  CALL(cuLaunchKernel)

#define CUMEM_TEST_CONTROL_CALLS(CALL)  \
  CALL(cumem_emulator_create)           \
  CALL(cumem_emulator_select)           \
  CALL(cumem_emulator_set_attribute)    \
  CALL(cumem_emulator_set_bandwidth)    \
  CALL(cumem_emulator_set_latency)      \
  CALL(cumem_emulator_set_host_limit)   \
  CALL(cumem_emulator_set_host_refusal) \
  CALL(cumem_emulator_fail)             \
  CALL(cumem_emulator_clear)            \
  CALL(cumem_emulator_call_count)       \
  CALL(cumem_emulator_poison)           \
  CALL(cumem_emulator_used_bytes)       \
  CALL(cumem_emulator_ledger)           \
  CALL(cumem_emulator_stream_create)    \
  CALL(cumem_emulator_stream_of)        \
  CALL(cumem_emulator_stream_destroy)   \
  CALL(cumem_emulator_enqueue_write)    \
  CALL(cumem_emulator_enqueue_read)     \
  CALL(cumem_emulator_enqueue_delay)    \
  CALL(cumem_emulator_begin_capture)    \
  CALL(cumem_emulator_end_capture)
// clang-format on

#define CUMEM_TEST_NAME_OF(name) #name

class LoadedDriver {
 public:
  static const LoadedDriver& instance() {
    static const LoadedDriver driver;
    return driver;
  }

#define CUMEM_TEST_MEMBER(name) decltype(&::name) name = nullptr;
  CUMEM_TEST_DRIVER_CALLS(CUMEM_TEST_MEMBER)
  CUMEM_TEST_CONTROL_CALLS(CUMEM_TEST_MEMBER)
#undef CUMEM_TEST_MEMBER

  bool is_emulated() const { return cumem_emulator_create != nullptr; }

 private:
  LoadedDriver() {
    const char* const variable = std::getenv("CUMEM_TEST_EMULATOR");
    std::string path = check::Registry::instance().argument;
    if (path.empty() && variable != nullptr) path = variable;
    void* const library = dlopen(path.c_str(), RTLD_NOW | RTLD_LOCAL);
    if (library == nullptr) throw std::runtime_error(dlerror());
#define CUMEM_TEST_LOAD(name) load(library, CUMEM_TEST_NAME_OF(name), &name);
    CUMEM_TEST_DRIVER_CALLS(CUMEM_TEST_LOAD)
#undef CUMEM_TEST_LOAD
    if (dlsym(library, "cumem_emulator_create") == nullptr) return;
#define CUMEM_TEST_LOAD(name) load(library, #name, &name);
    CUMEM_TEST_CONTROL_CALLS(CUMEM_TEST_LOAD)
#undef CUMEM_TEST_LOAD
  }

  template <class Function>
  static void load(void* library, const char* name, Function* function) {
    *function = reinterpret_cast<Function>(dlsym(library, name));
    if (*function == nullptr) throw std::runtime_error(std::string("no ") + name);
  }
};
