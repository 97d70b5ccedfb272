// Can a test steer the emulated driver, and look into it?

#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include <thread>

#include "computer.h"

namespace {

TEST(stale_handles_are_errors) {
  const Emulated pc;
  const auto handle = pc.create();
  const CUdeviceptr at = pc.reserve();
  CHECK_OK(pc.cu.cuMemRelease(handle));
  CHECK_EQ(pc.cu.cuMemRelease(handle), CUDA_ERROR_INVALID_VALUE);
  CHECK_EQ(pc.cu.cuMemMap(at, kChunk, 0, handle, 0), CUDA_ERROR_INVALID_VALUE);
  CHECK_OK(pc.cu.cuMemAddressFree(at, kChunk));
  CHECK_EQ(pc.cu.cuMemAddressFree(at, kChunk), CUDA_ERROR_INVALID_VALUE);
  CHECK_EQ(pc.cu.cuStreamDestroy(reinterpret_cast<CUstream>(0x1234)), CUDA_ERROR_INVALID_HANDLE);
  CHECK_EQ(pc.cu.cuEventDestroy(reinterpret_cast<CUevent>(0x1234)), CUDA_ERROR_INVALID_HANDLE);
  CHECK_EQ(pc.cu.cuCtxPushCurrent(reinterpret_cast<CUcontext>(0x1234)), CUDA_ERROR_INVALID_CONTEXT);
}

TEST(ledger_counts_what_is_alive) {
  const Emulated pc;
  const CUdeviceptr at = pc.reserve(2 * kChunk);
  auto handle = pc.create();
  REQUIRE_OK(pc.cu.cuMemMap(at, kChunk, 0, handle, 0));
  REQUIRE_OK(pc.cu.cuMemRetainAllocationHandle(&handle, reinterpret_cast<void*>(at)));
  CHECK_EQ(pc.ledger().handle_references, 2u);
  CHECK_OK(pc.cu.cuMemRelease(handle));
  CHECK_OK(pc.cu.cuMemRelease(handle));
  CHECK_EQ(pc.cu.cuMemRelease(handle), CUDA_ERROR_INVALID_VALUE);
  auto ledger = pc.ledger();
  CHECK_EQ(ledger.handles, 1u);
  CHECK_EQ(ledger.handle_bytes, kChunk);
  CHECK_EQ(ledger.handle_references, 0u);
  CHECK_EQ(ledger.mappings, 1u);
  CHECK_EQ(ledger.reserved_bytes, 2 * kChunk);
  CHECK_EQ(ledger.contexts_retained, 1u);
  CHECK_OK(pc.cu.cuMemUnmap(at, kChunk));
  CHECK_OK(pc.cu.cuMemAddressFree(at, 2 * kChunk));
  ledger = pc.ledger();
  CHECK_EQ(ledger.handles + ledger.mappings + ledger.reservations, 0u);
  CHECK_EQ(pc.cu.cumem_emulator_used_bytes(pc.machine, 0), 0u);
}

TEST(injected_failure_fires_once_before_any_effect) {
  const Emulated pc;
  const CUmemAllocationProp prop = pc.prop();
  CUmemGenericAllocationHandle handle = 0;
  CHECK_EQ(pc.cu.cumem_emulator_fail(pc.machine, "cuMemCreate", 2, CUDA_ERROR_OUT_OF_MEMORY), 0);
  CHECK_EQ(pc.cu.cumem_emulator_fail(pc.machine, "cuMemCreate", 3, CUDA_ERROR_UNKNOWN), 0);
  CHECK_EQ(pc.cu.cumem_emulator_fail(pc.machine, "cuMemCreate_v2", 1, 2), -1);
  CHECK_EQ(pc.cu.cumem_emulator_fail(pc.machine, "cuMemCreate", 0, 2), -1);
  CHECK_EQ(pc.cu.cumem_emulator_fail(12345, "cuMemCreate", 1, 2), -1);
  const long before = pc.cu.cumem_emulator_call_count(pc.machine, "cuMemCreate");
  std::vector<CUmemGenericAllocationHandle> made{pc.create()};
  CHECK_EQ(pc.cu.cuMemCreate(&handle, kChunk, &prop, 0), CUDA_ERROR_OUT_OF_MEMORY);
  CHECK_EQ(pc.ledger().handles, 1u);
  CHECK_EQ(pc.cu.cuMemCreate(&handle, kChunk, &prop, 0), CUDA_ERROR_UNKNOWN);
  made.push_back(pc.create());
  CHECK_EQ(pc.cu.cumem_emulator_call_count(pc.machine, "cuMemCreate"), before + 4);
  CHECK_EQ(pc.cu.cumem_emulator_call_count(pc.machine, "cuNothing"), -1);
  for (const auto each : made) CHECK_OK(pc.cu.cuMemRelease(each));
  CHECK_EQ(pc.cu.cumem_emulator_fail(pc.machine, "cuCtxSynchronize", 1, 700), 0);
  CHECK_EQ(pc.cu.cumem_emulator_clear(pc.machine), 0);
  CHECK_OK(pc.cu.cuCtxSynchronize());
}

TEST(every_exported_call_can_be_made_to_fail) {
  const Emulated pc;
  std::size_t known = 0;
#define CUMEM_TEST_KNOWN(name) \
  known += pc.cu.cumem_emulator_call_count(pc.machine, unversioned(#name).c_str()) >= 0 ? 1u : 0u;
  const auto unversioned = [](std::string name) {
    const auto suffix = name.find("_v");
    return suffix == std::string::npos ? name : name.substr(0, suffix);
  };
#define CUMEM_TEST_EXPANDED(name) CUMEM_TEST_KNOWN(name)
  CUMEM_TEST_DRIVER_CALLS(CUMEM_TEST_EXPANDED)
#define CUMEM_TEST_ONE(name) +1u
  CHECK_EQ(known, std::size_t{0 CUMEM_TEST_DRIVER_CALLS(CUMEM_TEST_ONE)});
#undef CUMEM_TEST_ONE
#undef CUMEM_TEST_EXPANDED
#undef CUMEM_TEST_KNOWN
}

TEST(poisoned_context_stays_dead) {
  const Emulated pc;
  const CUdeviceptr at = pc.reserve();
  const auto handle = pc.create();
  CHECK_EQ(pc.cu.cumem_emulator_poison(pc.machine, 0, CUDA_ERROR_ILLEGAL_ADDRESS), 0);
  const CUmemAllocationProp prop = pc.prop();
  CUmemGenericAllocationHandle other = 0;
  CUstream stream = nullptr;
  for (int round = 0; round < 2; ++round) {
    CHECK_EQ(pc.cu.cuCtxSynchronize(), CUDA_ERROR_ILLEGAL_ADDRESS);
    CHECK_EQ(pc.cu.cuMemCreate(&other, kChunk, &prop, 0), CUDA_ERROR_ILLEGAL_ADDRESS);
    CHECK_EQ(pc.cu.cuMemRelease(handle), CUDA_ERROR_ILLEGAL_ADDRESS);
    CHECK_EQ(pc.cu.cuStreamCreate(&stream, 0), CUDA_ERROR_ILLEGAL_ADDRESS);
  }
  CHECK_EQ(pc.cu.cumem_emulator_poison(pc.machine, 0, 0), 0);
  CHECK_OK(pc.cu.cuMemRelease(handle));
  CHECK_OK(pc.cu.cuMemAddressFree(at, kChunk));
}

TEST(write_to_unmapped_memory_is_found_when_it_runs) {
  const Emulated pc;
  const CUdeviceptr at = pc.reserve();
  const unsigned char byte = 1;
  CHECK_EQ(pc.cu.cumem_emulator_enqueue_write(pc.machine, nullptr, at, &byte, 1, 0), 0);
  CHECK_EQ(pc.cu.cuStreamSynchronize(nullptr), CUDA_ERROR_ILLEGAL_ADDRESS);
  CHECK_EQ(pc.cu.cumem_emulator_poison(pc.machine, 0, 0), 0);
  CHECK_OK(pc.cu.cuMemAddressFree(at, kChunk));
}

TEST(attributes_can_be_absent_or_unknown) {
  const Emulated pc;
  const auto which = CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_WITH_CUDA_VMM_SUPPORTED;
  int value = 7;
  CHECK_EQ(pc.cu.cumem_emulator_set_attribute(pc.machine, which, 0), 0);
  CHECK_OK(pc.cu.cuDeviceGetAttribute(&value, which, pc.device));
  CHECK_EQ(value, 0);
  CUmemAllocationProp prop = pc.prop();
  prop.allocFlags.gpuDirectRDMACapable = 1;
  CUmemGenericAllocationHandle handle = 0;
  CHECK_EQ(pc.cu.cuMemCreate(&handle, kChunk, &prop, 0), CUDA_ERROR_NOT_SUPPORTED);
  CHECK_EQ(pc.cu.cumem_emulator_set_attribute(pc.machine, which, -1), 0);
  CHECK_EQ(pc.cu.cuDeviceGetAttribute(&value, which, pc.device), CUDA_ERROR_INVALID_VALUE);
}

TEST(host_memory_can_be_limited_and_refused) {
  const Emulated pc;
  std::vector<unsigned char> host(4 * kMiB);
  CHECK_EQ(pc.cu.cumem_emulator_set_host_limit(pc.machine, 3 * kMiB), 0);
  CHECK_OK(pc.cu.cuMemHostRegister(host.data(), 2 * kMiB, 0));
  CHECK_EQ(pc.cu.cuMemHostRegister(host.data() + 2 * kMiB, 2 * kMiB, 0), CUDA_ERROR_OUT_OF_MEMORY);
  CHECK_EQ(pc.ledger().registered_bytes, 2 * kMiB);
  CHECK_OK(pc.cu.cuMemHostUnregister(host.data()));
  CHECK_EQ(pc.cu.cumem_emulator_set_host_refusal(pc.machine, 1), 0);
  CHECK_EQ(pc.cu.cuMemHostRegister(host.data(), kMiB, 0), CUDA_ERROR_NOT_PERMITTED);
  void* const nowhere = mmap(nullptr, kMiB, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  munmap(nowhere, kMiB);
  CHECK_EQ(pc.cu.cumem_emulator_set_host_refusal(pc.machine, 0), 0);
  CHECK_EQ(pc.cu.cuMemHostRegister(nowhere, kMiB, 0), CUDA_ERROR_INVALID_VALUE);
}

TEST(machines_are_apart_and_outlive_their_turn) {
  const Emulated old(16 * kMiB);
  const Chunk chunk(old);
  const auto before = chunk.contents();
  {
    const Emulated other(32 * kMiB, 2);
    CHECK(other.device != old.device);
    int count = 0;
    CHECK_OK(other.cu.cuDeviceGetCount(&count));
    CHECK_EQ(count, 2);
    int can = 0;
    CHECK_OK(other.cu.cuDeviceCanAccessPeer(&can, other.device, other.device + 1));
    CHECK_EQ(can, 1);
    CHECK_OK(other.cu.cuDeviceCanAccessPeer(&can, other.device, old.device));
    CHECK_EQ(can, 0);
    CHECK_EQ(other.cu.cumem_emulator_fail(other.machine, "cuMemUnmap", 1, 2), 0);
    CHECK_OK(old.cu.cuMemUnmap(chunk.pointer, kChunk));
    CHECK_OK(old.cu.cuMemMap(chunk.pointer, kChunk, 0, chunk.handle, 0));
    CHECK_OK(old.allow(chunk.pointer));
    CHECK_EQ(other.ledger().handles, 0u);
  }
  CHECK(chunk.contents() == before);
}

TEST(peer_access_is_separate_for_each_device) {
  const Emulated pc(16 * kMiB, 2);
  const Chunk chunk(pc);
  CUcontext second = nullptr;
  REQUIRE_OK(pc.cu.cuDevicePrimaryCtxRetain(&second, pc.device + 1));
  REQUIRE_OK(pc.cu.cuCtxPushCurrent(second));
  std::vector<unsigned char> seen(16);
  CHECK_EQ(pc.cu.cuMemcpyDtoH(seen.data(), chunk.pointer, 16), CUDA_ERROR_INVALID_VALUE);
  const CUmemAccessDesc both[] = {pc.access(), pc.access(CU_MEM_ACCESS_FLAGS_PROT_READ, 1)};
  CHECK_OK(pc.cu.cuMemSetAccess(chunk.pointer, kChunk, both, 2));
  CHECK_OK(pc.cu.cuMemcpyDtoH(seen.data(), chunk.pointer, 16));
  CHECK_EQ(pc.cu.cuMemcpyHtoD(chunk.pointer, seen.data(), 16), CUDA_ERROR_INVALID_VALUE);
  CHECK_OK(pc.cu.cuCtxPopCurrent(&second));
  CHECK_OK(pc.cu.cuDevicePrimaryCtxRelease(pc.device + 1));
}

TEST(last_release_of_a_context_takes_its_things) {
  const Emulated pc;
  CUstream stream = nullptr;
  CUevent event = nullptr;
  CUdeviceptr plain = 0;
  REQUIRE_OK(pc.cu.cuStreamCreate(&stream, CU_STREAM_NON_BLOCKING));
  REQUIRE_OK(pc.cu.cuEventCreate(&event, 0));
  REQUIRE_OK(pc.cu.cuMemAlloc(&plain, kMiB));
  CHECK_OK(pc.cu.cuDevicePrimaryCtxRelease(pc.device));
  CHECK_EQ(pc.cu.cuCtxSynchronize(), CUDA_ERROR_CONTEXT_IS_DESTROYED);
  const auto ledger = pc.ledger();
  CHECK_EQ(ledger.streams + ledger.events + ledger.plain_allocations, 0u);
  CHECK_EQ(pc.cu.cuDevicePrimaryCtxRelease(pc.device), CUDA_ERROR_INVALID_CONTEXT);
  CUcontext again = nullptr;
  CHECK_OK(pc.cu.cuDevicePrimaryCtxRetain(&again, pc.device));
  CHECK(again == pc.context);
}

TEST(streams_of_the_control_calls_are_streams) {
  const Emulated pc;
  void* const made = pc.cu.cumem_emulator_stream_create(pc.machine, 0, 1);
  REQUIRE(made != nullptr);
  const auto stream = static_cast<CUstream>(made);
  CHECK_OK(pc.cu.cuStreamSynchronize(stream));
  CHECK_EQ(pc.cu.cumem_emulator_begin_capture(made), 0);
  CHECK_EQ(pc.cu.cuStreamSynchronize(stream), CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED);
  CHECK_EQ(pc.cu.cumem_emulator_end_capture(made), CUDA_ERROR_STREAM_CAPTURE_INVALIDATED);
  CHECK_EQ(pc.cu.cumem_emulator_end_capture(made), CUDA_ERROR_ILLEGAL_STATE);
  CHECK_EQ(pc.cu.cumem_emulator_stream_destroy(made), 0);
  CHECK_EQ(pc.cu.cumem_emulator_stream_destroy(made), CUDA_ERROR_INVALID_HANDLE);
  void* const legacy = pc.cu.cumem_emulator_stream_of(pc.machine, 0);
  CHECK_EQ(pc.cu.cumem_emulator_enqueue_delay(pc.machine, legacy, 20000), 0);
  CHECK_EQ(pc.cu.cuStreamQuery(nullptr), CUDA_ERROR_NOT_READY);
  CHECK_OK(pc.cu.cuStreamSynchronize(nullptr));
}

TEST(forked_child_has_no_driver) {
  const Emulated pc;
  const pid_t child = fork();
  if (child == 0) {
    int count = 0;
    const bool refused = pc.cu.cuDeviceGetCount(&count) == CUDA_ERROR_NOT_INITIALIZED &&
                         pc.cu.cuInit(0) == CUDA_ERROR_NOT_INITIALIZED &&
                         pc.cu.cumem_emulator_create(kChunk, 1) == -1;
    _exit(refused ? 0 : 1);
  }
  int status = 0;
  REQUIRE(waitpid(child, &status, 0) == child);
  CHECK_EQ(status, 0);
}

void churn(const Computer& pc, unsigned seed) {
  pc.cu.cuCtxPushCurrent(pc.context);
  CUstream stream = nullptr;
  CHECK_OK(pc.cu.cuStreamCreate(&stream, seed % 2));
  const auto written = pattern(kChunk, seed);
  std::vector<unsigned char> pinned(kChunk);
  CHECK_OK(pc.cu.cuMemHostRegister(pinned.data(), kChunk, 0));
  for (int round = 0; round < 10; ++round) {
    const Chunk chunk(pc);
    CHECK_OK(pc.cu.cuMemcpyHtoDAsync(chunk.pointer, written.data(), kChunk, stream));
    CHECK_OK(pc.cu.cuMemcpyDtoHAsync(pinned.data(), chunk.pointer, kChunk, stream));
    CHECK_OK(round % 2 == 0 ? pc.cu.cuStreamSynchronize(stream) : pc.cu.cuCtxSynchronize());
    CHECK(pinned == written);
  }
  CHECK_OK(pc.cu.cuMemHostUnregister(pinned.data()));
  CHECK_OK(pc.cu.cuStreamDestroy(stream));
  pc.cu.cuCtxPopCurrent(nullptr);
}

TEST(many_threads_share_a_machine) {
  const Emulated pc(64 * kMiB);
  std::vector<std::thread> threads;
  for (unsigned seed = 0; seed < 6; ++seed) threads.emplace_back([&pc, seed] { churn(pc, seed); });
  for (std::thread& thread : threads) thread.join();
  const auto ledger = pc.ledger();
  CHECK_EQ(ledger.handles + ledger.mappings + ledger.reservations + ledger.streams, 0u);
}

}  // namespace
