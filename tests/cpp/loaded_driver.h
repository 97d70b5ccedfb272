// Which driver do the emulator's tests speak to?
//
// The one named by the program's first argument or by CUMEM_TEST_EMULATOR. It may be
// the real libcuda.so.1: then the tests of the driver's own rules say whether the
// emulator has them right, and those that need control.h are skipped.
#pragma once

#include <cuda.h>
#include <dlfcn.h>

#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <stdexcept>
#include <string>
#include <vector>

#include "check.h"
#include "emulator/control.h"

#define CUMEM_TEST_DRIVER_CALLS(CALL)                                                       \
  CALL(cuInit) CALL(cuDriverGetVersion) CALL(cuGetErrorName) CALL(cuDeviceGetCount)         \
  CALL(cuDeviceGet) CALL(cuDeviceGetName) CALL(cuDeviceGetAttribute) CALL(cuDeviceTotalMem) \
  CALL(cuDeviceCanAccessPeer) CALL(cuDeviceGetPCIBusId) CALL(cuDevicePrimaryCtxRetain)      \
  CALL(cuDevicePrimaryCtxRelease) CALL(cuCtxGetCurrent) CALL(cuCtxPushCurrent)              \
  CALL(cuCtxPopCurrent) CALL(cuCtxSynchronize) CALL(cuMemGetInfo)                           \
  CALL(cuMemGetAllocationGranularity) CALL(cuMemAddressReserve) CALL(cuMemAddressFree)      \
  CALL(cuMemCreate) CALL(cuMemRelease) CALL(cuMemMap) CALL(cuMemUnmap) CALL(cuMemSetAccess) \
  CALL(cuMemGetAccess) CALL(cuMemRetainAllocationHandle) CALL(cuMemExportToShareableHandle) \
  CALL(cuMemHostRegister) CALL(cuMemHostUnregister) CALL(cuMemcpyDtoHAsync)                 \
  CALL(cuMemcpyHtoDAsync) CALL(cuMemsetD8Async) CALL(cuMemcpyDtoH) CALL(cuMemcpyHtoD)       \
  CALL(cuMemAlloc) CALL(cuMemFree) CALL(cuMemGetAddressRange) CALL(cuPointerGetAttribute)   \
  CALL(cuStreamCreate) CALL(cuStreamDestroy) CALL(cuStreamSynchronize) CALL(cuStreamQuery)  \
  CALL(cuStreamIsCapturing) CALL(cuStreamWaitEvent) CALL(cuStreamBeginCapture)              \
  CALL(cuStreamEndCapture) CALL(cuThreadExchangeStreamCaptureMode) CALL(cuEventCreate)      \
  CALL(cuEventRecord) CALL(cuEventQuery) CALL(cuEventSynchronize) CALL(cuEventDestroy)

#define CUMEM_TEST_CONTROL_CALLS(CALL)                                                      \
  CALL(cumem_emulator_create) CALL(cumem_emulator_select) CALL(cumem_emulator_set_attribute) \
  CALL(cumem_emulator_set_bandwidth) CALL(cumem_emulator_set_latency)                       \
  CALL(cumem_emulator_set_host_limit) CALL(cumem_emulator_set_host_refusal)                 \
  CALL(cumem_emulator_fail) CALL(cumem_emulator_clear) CALL(cumem_emulator_call_count)      \
  CALL(cumem_emulator_poison) CALL(cumem_emulator_used_bytes) CALL(cumem_emulator_ledger)   \
  CALL(cumem_emulator_stream_create) CALL(cumem_emulator_stream_of)                         \
  CALL(cumem_emulator_stream_destroy) CALL(cumem_emulator_enqueue_write)                    \
  CALL(cumem_emulator_enqueue_read) CALL(cumem_emulator_enqueue_delay)                      \
  CALL(cumem_emulator_begin_capture) CALL(cumem_emulator_end_capture)

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

constexpr std::size_t kMiB = std::size_t{1} << 20;
constexpr std::size_t kChunk = 2 * kMiB;

#define CHECK_OK(call) CHECK_EQ((call), CUDA_SUCCESS)
#define REQUIRE_OK(call) REQUIRE((call) == CUDA_SUCCESS)

// A fresh machine (under the real driver: the machine there is), current, with the
// context of its device 0 pushed.
class Computer {
 public:
  explicit Computer(std::uint64_t capacity = 64 * kMiB, int devices = 1) {
    if (cu.is_emulated()) {
      machine = cu.cumem_emulator_create(capacity, devices);
      before_ = cu.cumem_emulator_select(machine);
    }
    REQUIRE_OK(cu.cuInit(0));
    REQUIRE_OK(cu.cuDeviceGet(&device, 0));
    REQUIRE_OK(cu.cuDevicePrimaryCtxRetain(&context, device));
    REQUIRE_OK(cu.cuCtxPushCurrent(context));
  }
  ~Computer() {
    cu.cuCtxPopCurrent(nullptr);
    cu.cuDevicePrimaryCtxRelease(device);
    if (cu.is_emulated()) cu.cumem_emulator_select(before_);
  }
  Computer(const Computer&) = delete;
  Computer& operator=(const Computer&) = delete;

  void need_control() const {
    if (!cu.is_emulated()) SKIP("needs the emulator's control calls");
  }
  cumem_emulator_ledger_t ledger() const {
    cumem_emulator_ledger_t now{};
    cu.cumem_emulator_ledger(machine, &now);
    return now;
  }
  CUmemAllocationProp prop(int ordinal = 0) const {
    CUmemAllocationProp made{};
    made.type = CU_MEM_ALLOCATION_TYPE_PINNED;
    made.location.type = CU_MEM_LOCATION_TYPE_DEVICE;
    made.location.id = device + ordinal;
    return made;
  }
  CUmemAccessDesc access(CUmemAccess_flags flags = CU_MEM_ACCESS_FLAGS_PROT_READWRITE,
                         int ordinal = 0) const {
    CUmemAccessDesc made{};
    made.location = prop(ordinal).location;
    made.flags = flags;
    return made;
  }
  CUmemGenericAllocationHandle create(std::size_t bytes = kChunk) const {
    const CUmemAllocationProp wanted = prop();
    CUmemGenericAllocationHandle handle = 0;
    REQUIRE_OK(cu.cuMemCreate(&handle, bytes, &wanted, 0));
    return handle;
  }
  CUdeviceptr reserve(std::size_t bytes = kChunk) const {
    CUdeviceptr pointer = 0;
    REQUIRE_OK(cu.cuMemAddressReserve(&pointer, bytes, 0, 0, 0));
    return pointer;
  }
  CUresult allow(CUdeviceptr pointer, std::size_t bytes = kChunk) const {
    const CUmemAccessDesc wanted = access();
    return cu.cuMemSetAccess(pointer, bytes, &wanted, 1);
  }

  const LoadedDriver& cu = LoadedDriver::instance();
  int machine = 0;
  CUdevice device = 0;
  CUcontext context = nullptr;

 private:
  int before_ = 0;
};

// A mapped and accessible chunk, given back at the end unless let go.
class Chunk {
 public:
  explicit Chunk(const Computer& computer, std::size_t size = kChunk)
      : bytes(size), cu(computer.cu) {
    pointer = computer.reserve(bytes);
    handle = computer.create(bytes);
    REQUIRE_OK(cu.cuMemMap(pointer, bytes, 0, handle, 0));
    REQUIRE_OK(computer.allow(pointer, bytes));
  }
  ~Chunk() {
    cu.cuMemUnmap(pointer, bytes);
    cu.cuMemRelease(handle);
    cu.cuMemAddressFree(pointer, bytes);
  }
  Chunk(const Chunk&) = delete;
  Chunk& operator=(const Chunk&) = delete;

  std::vector<unsigned char> contents() const {
    std::vector<unsigned char> copy(bytes);
    REQUIRE_OK(cu.cuMemcpyDtoH(copy.data(), pointer, bytes));
    return copy;
  }

  CUdeviceptr pointer = 0;
  CUmemGenericAllocationHandle handle = 0;
  const std::size_t bytes;
  const LoadedDriver& cu;
};

// Bytes that depend on their position.
inline std::vector<unsigned char> pattern(std::size_t bytes, unsigned seed) {
  std::vector<unsigned char> made(bytes);
  for (std::size_t i = 0; i < bytes; ++i) {
    made[i] = static_cast<unsigned char>((i * 2654435761u + seed * 97u) >> 11);
  }
  return made;
}
