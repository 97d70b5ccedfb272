// What do the emulator's tests work with?
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "loaded_driver.h"

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

// A Computer for tests that make no sense under the real driver.
class Emulated : public Computer {
 public:
  explicit Emulated(std::uint64_t capacity = 64 * kMiB, int devices = 1)
      : Computer(capacity, devices) {
    need_control();
  }
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

// Host memory that is registered.
class PinnedBytes {
 public:
  PinnedBytes(const Computer& computer, std::size_t size) : bytes(size), cu_(computer.cu) {
    REQUIRE_OK(cu_.cuMemHostRegister(bytes.data(), size, 0));
  }
  ~PinnedBytes() { cu_.cuMemHostUnregister(bytes.data()); }
  PinnedBytes(const PinnedBytes&) = delete;
  PinnedBytes& operator=(const PinnedBytes&) = delete;
  std::vector<unsigned char> bytes;

 private:
  const LoadedDriver& cu_;
};

// A stream of the computer's context.
class StreamOf {
 public:
  explicit StreamOf(const Computer& computer, unsigned flags = CU_STREAM_NON_BLOCKING)
      : cu_(computer.cu) {
    REQUIRE_OK(cu_.cuStreamCreate(&stream, flags));
  }
  ~StreamOf() { cu_.cuStreamDestroy(stream); }
  StreamOf(const StreamOf&) = delete;
  StreamOf& operator=(const StreamOf&) = delete;
  CUstream stream = nullptr;

 private:
  const LoadedDriver& cu_;
};
