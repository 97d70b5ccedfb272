// Does the emulated driver keep the driver's rules about memory?

#include <cstring>

#include "computer.h"

namespace {

TEST(driver_names_itself_and_its_errors) {
  const Computer pc;
  int version = 0;
  CHECK_OK(pc.cu.cuDriverGetVersion(&version));
  CHECK(version >= 12000);
  const char* name = nullptr;
  CHECK_OK(pc.cu.cuGetErrorName(CUDA_ERROR_OUT_OF_MEMORY, &name));
  CHECK_EQ(std::string(name), "CUDA_ERROR_OUT_OF_MEMORY");
  CHECK_EQ(pc.cu.cuGetErrorName(static_cast<CUresult>(1000), &name), CUDA_ERROR_INVALID_VALUE);
  CHECK(name == nullptr);
}

TEST(device_answers_or_is_unknown) {
  const Computer pc;
  int value = 0;
  const auto vmm = CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED;
  CHECK_OK(pc.cu.cuDeviceGetAttribute(&value, vmm, pc.device));
  CHECK_EQ(value, 1);
  CHECK_EQ(pc.cu.cuDeviceGetAttribute(&value, static_cast<CUdevice_attribute>(200), pc.device),
           CUDA_ERROR_INVALID_VALUE);
  CHECK_EQ(pc.cu.cuDeviceGetAttribute(&value, vmm, pc.device + 63), CUDA_ERROR_INVALID_DEVICE);
  CHECK_EQ(pc.cu.cuDeviceGetAttribute(&value, vmm, -1), CUDA_ERROR_INVALID_DEVICE);
  char text[64] = "";
  CHECK_OK(pc.cu.cuDeviceGetName(text, sizeof(text), pc.device));
  CHECK(std::strlen(text) > 0);
  CHECK_OK(pc.cu.cuDeviceGetPCIBusId(text, sizeof(text), pc.device));
  CHECK(std::strchr(text, ':') != nullptr);
}

TEST(context_stack_is_per_thread_and_refuses_nonsense) {
  const Computer pc;
  CUcontext now = nullptr;
  CHECK_OK(pc.cu.cuCtxGetCurrent(&now));
  CHECK(now == pc.context);
  CHECK_OK(pc.cu.cuCtxPopCurrent(&now));
  CHECK_EQ(pc.cu.cuCtxSynchronize(), CUDA_ERROR_INVALID_CONTEXT);
  CHECK_EQ(pc.cu.cuCtxPopCurrent(&now), CUDA_ERROR_INVALID_CONTEXT);
  CUdeviceptr pointer = 0;
  CHECK_EQ(pc.cu.cuMemAlloc(&pointer, 1), CUDA_ERROR_INVALID_CONTEXT);
  CHECK_OK(pc.cu.cuCtxPushCurrent(pc.context));
}

TEST(granularity_rules_sizes) {
  const Computer pc;
  const CUmemAllocationProp prop = pc.prop();
  std::size_t granularity = 0;
  CHECK_OK(pc.cu.cuMemGetAllocationGranularity(&granularity, &prop,
                                               CU_MEM_ALLOC_GRANULARITY_RECOMMENDED));
  CHECK_EQ(granularity, kChunk);
  CUmemGenericAllocationHandle handle = 0;
  CHECK_EQ(pc.cu.cuMemCreate(&handle, kChunk + 4096, &prop, 0), CUDA_ERROR_INVALID_VALUE);
  CHECK_EQ(pc.cu.cuMemCreate(&handle, 0, &prop, 0), CUDA_ERROR_INVALID_VALUE);
  CHECK_EQ(pc.cu.cuMemCreate(&handle, kChunk, &prop, 1), CUDA_ERROR_INVALID_VALUE);
  CUdeviceptr pointer = 0;
  CHECK_EQ(pc.cu.cuMemAddressReserve(&pointer, 0, 0, 0, 0), CUDA_ERROR_INVALID_VALUE);
  CHECK_EQ(pc.cu.cuMemAddressReserve(&pointer, kChunk, 3, 0, 0), CUDA_ERROR_INVALID_VALUE);
  CHECK_EQ(pc.cu.cuMemAddressReserve(&pointer, kChunk + 1, 0, 0, 0), CUDA_ERROR_INVALID_VALUE);
}

TEST(reservation_honours_alignment) {
  const Computer pc;
  CUdeviceptr pointer = 0;
  REQUIRE_OK(pc.cu.cuMemAddressReserve(&pointer, kChunk, 64 * kMiB, 0, 0));
  CHECK_EQ(pointer % (64 * kMiB), 0u);
  CHECK_OK(pc.cu.cuMemAddressFree(pointer, kChunk));
}

TEST(wrong_properties_are_refused) {
  const Computer pc;
  CUmemGenericAllocationHandle handle = 0;
  CUmemAllocationProp prop = pc.prop();
  prop.type = static_cast<CUmemAllocationType>(0);
  CHECK_EQ(pc.cu.cuMemCreate(&handle, kChunk, &prop, 0), CUDA_ERROR_INVALID_VALUE);
  prop = pc.prop();
  prop.location.id = pc.device + 40;
  CHECK_EQ(pc.cu.cuMemCreate(&handle, kChunk, &prop, 0), CUDA_ERROR_INVALID_DEVICE);
  prop = pc.prop();
  prop.requestedHandleTypes = CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR;
  prop.allocFlags.gpuDirectRDMACapable = 1;
  REQUIRE_OK(pc.cu.cuMemCreate(&handle, kChunk, &prop, 0));
  CHECK_OK(pc.cu.cuMemRelease(handle));
}

TEST(mapping_needs_a_free_place_in_one_reservation) {
  const Computer pc;
  const CUdeviceptr at = pc.reserve(4 * kChunk);
  const auto handle = pc.create(2 * kChunk);
  CHECK_EQ(pc.cu.cuMemMap(at + 3 * kChunk, 2 * kChunk, 0, handle, 0), CUDA_ERROR_INVALID_VALUE);
  CHECK_EQ(pc.cu.cuMemMap(at, 2 * kChunk, 4096, handle, 0), CUDA_ERROR_INVALID_VALUE);
  CHECK_EQ(pc.cu.cuMemMap(at, 3 * kChunk, 0, handle, 0), CUDA_ERROR_INVALID_VALUE);
  CHECK_EQ(pc.cu.cuMemMap(at + 4096, kChunk, 0, handle, 0), CUDA_ERROR_INVALID_VALUE);
  CHECK_EQ(pc.cu.cuMemMap(at, kChunk + 4096, 0, handle, 0), CUDA_ERROR_INVALID_VALUE);
  REQUIRE_OK(pc.cu.cuMemMap(at, 2 * kChunk, 0, handle, 0));
  CHECK_EQ(pc.cu.cuMemMap(at + kChunk, 2 * kChunk, 0, handle, 0), CUDA_ERROR_INVALID_VALUE);
  CHECK_EQ(pc.cu.cuMemMap(at, kChunk, 0, handle, 0), CUDA_ERROR_INVALID_VALUE);
  CHECK_OK(pc.cu.cuMemUnmap(at, 2 * kChunk));
  CHECK_OK(pc.cu.cuMemRelease(handle));
  CHECK_OK(pc.cu.cuMemAddressFree(at, 4 * kChunk));
}

TEST(unmapping_takes_whole_mappings_only) {
  const Computer pc;
  const CUdeviceptr at = pc.reserve(4 * kChunk);
  const auto first = pc.create(2 * kChunk);
  const auto second = pc.create(kChunk);
  REQUIRE_OK(pc.cu.cuMemMap(at, 2 * kChunk, 0, first, 0));
  REQUIRE_OK(pc.cu.cuMemMap(at + 2 * kChunk, kChunk, 0, second, 0));
  CHECK_EQ(pc.cu.cuMemUnmap(at, kChunk), CUDA_ERROR_INVALID_VALUE);
  CHECK_EQ(pc.cu.cuMemUnmap(at + kChunk, 2 * kChunk), CUDA_ERROR_INVALID_VALUE);
  CHECK_EQ(pc.cu.cuMemUnmap(at, 4 * kChunk), CUDA_ERROR_INVALID_VALUE);
  CHECK_EQ(pc.cu.cuMemUnmap(at + 3 * kChunk, kChunk), CUDA_ERROR_INVALID_VALUE);
  CHECK_OK(pc.cu.cuMemUnmap(at, 3 * kChunk));
  CHECK_EQ(pc.cu.cuMemUnmap(at, 3 * kChunk), CUDA_ERROR_INVALID_VALUE);
  CHECK_OK(pc.cu.cuMemRelease(first));
  CHECK_OK(pc.cu.cuMemRelease(second));
  CHECK_OK(pc.cu.cuMemAddressFree(at, 4 * kChunk));
}

TEST(reservation_is_freed_whole_and_empty_only) {
  const Computer pc;
  const CUdeviceptr at = pc.reserve(2 * kChunk);
  const auto handle = pc.create();
  REQUIRE_OK(pc.cu.cuMemMap(at, kChunk, 0, handle, 0));
  CHECK_EQ(pc.cu.cuMemAddressFree(at, 2 * kChunk), CUDA_ERROR_INVALID_VALUE);
  CHECK_OK(pc.cu.cuMemUnmap(at, kChunk));
  CHECK_EQ(pc.cu.cuMemAddressFree(at, kChunk), CUDA_ERROR_INVALID_VALUE);
  CHECK_EQ(pc.cu.cuMemAddressFree(at + kChunk, kChunk), CUDA_ERROR_INVALID_VALUE);
  CHECK_OK(pc.cu.cuMemAddressFree(at, 2 * kChunk));
  CHECK_OK(pc.cu.cuMemRelease(handle));
}

TEST(access_is_given_to_whole_mappings_and_must_be_given_again) {
  const Computer pc;
  const CUdeviceptr at = pc.reserve(3 * kChunk);
  const auto handle = pc.create();
  REQUIRE_OK(pc.cu.cuMemMap(at, kChunk, 0, handle, 0));
  unsigned char byte = 0;
  CHECK_EQ(pc.cu.cuMemcpyDtoH(&byte, at, 1), CUDA_ERROR_INVALID_VALUE);
  CHECK_EQ(pc.allow(at, 2 * kChunk), CUDA_ERROR_INVALID_VALUE);
  CHECK_EQ(pc.allow(at + kChunk), CUDA_ERROR_INVALID_VALUE);
  CHECK_OK(pc.allow(at));
  CHECK_OK(pc.cu.cuMemcpyDtoH(&byte, at, 1));
  unsigned long long flags = 0;
  const CUmemLocation location = pc.prop().location;
  CHECK_OK(pc.cu.cuMemGetAccess(&flags, &location, at));
  CHECK_EQ(flags, static_cast<unsigned long long>(CU_MEM_ACCESS_FLAGS_PROT_READWRITE));
  CHECK_OK(pc.cu.cuMemUnmap(at, kChunk));
  CHECK_EQ(pc.cu.cuMemGetAccess(&flags, &location, at), CUDA_ERROR_INVALID_VALUE);
  REQUIRE_OK(pc.cu.cuMemMap(at, kChunk, 0, handle, 0));
  CHECK_OK(pc.cu.cuMemGetAccess(&flags, &location, at));
  CHECK_EQ(flags, static_cast<unsigned long long>(CU_MEM_ACCESS_FLAGS_PROT_NONE));
  CHECK_OK(pc.cu.cuMemUnmap(at, kChunk));
  CHECK_OK(pc.cu.cuMemRelease(handle));
  CHECK_OK(pc.cu.cuMemAddressFree(at, 3 * kChunk));
}

TEST(copy_must_lie_in_accessible_memory) {
  const Computer pc;
  const CUdeviceptr at = pc.reserve(2 * kChunk);
  const auto handle = pc.create();
  REQUIRE_OK(pc.cu.cuMemMap(at, kChunk, 0, handle, 0));
  REQUIRE_OK(pc.allow(at));
  std::vector<unsigned char> host(kChunk);
  CHECK_OK(pc.cu.cuMemcpyHtoD(at, host.data(), kChunk));
  CHECK_EQ(pc.cu.cuMemcpyHtoD(at + kChunk / 2, host.data(), kChunk), CUDA_ERROR_INVALID_VALUE);
  CHECK_EQ(pc.cu.cuMemsetD8Async(at + kChunk, 1, 16, nullptr), CUDA_ERROR_INVALID_VALUE);
  CHECK_OK(pc.cu.cuMemUnmap(at, kChunk));
  CHECK_OK(pc.cu.cuMemRelease(handle));
  CHECK_OK(pc.cu.cuMemAddressFree(at, 2 * kChunk));
}

TEST(contents_follow_the_handle_to_another_address) {
  const Computer pc;
  const auto written = pattern(kChunk, 1);
  Chunk chunk(pc);
  REQUIRE_OK(pc.cu.cuMemcpyHtoD(chunk.pointer, written.data(), kChunk));
  CHECK(chunk.contents() == written);
  const CUdeviceptr other = pc.reserve();
  REQUIRE_OK(pc.cu.cuMemMap(other, kChunk, 0, chunk.handle, 0));
  REQUIRE_OK(pc.allow(other));
  std::vector<unsigned char> seen(kChunk);
  CHECK_OK(pc.cu.cuMemcpyDtoH(seen.data(), other, kChunk));
  CHECK(seen == written);
  CHECK_OK(pc.cu.cuMemUnmap(other, kChunk));
  CHECK_OK(pc.cu.cuMemAddressFree(other, kChunk));
}

TEST(memory_lives_until_last_mapping_and_last_reference_go) {
  const Computer pc;
  const auto written = pattern(kChunk, 2);
  const CUdeviceptr at = pc.reserve();
  auto handle = pc.create();
  REQUIRE_OK(pc.cu.cuMemMap(at, kChunk, 0, handle, 0));
  REQUIRE_OK(pc.allow(at));
  REQUIRE_OK(pc.cu.cuMemcpyHtoD(at, written.data(), kChunk));
  CHECK_OK(pc.cu.cuMemRelease(handle));
  REQUIRE_OK(pc.cu.cuMemRetainAllocationHandle(&handle, reinterpret_cast<void*>(at + 5)));
  CHECK_OK(pc.cu.cuMemUnmap(at, kChunk));
  REQUIRE_OK(pc.cu.cuMemMap(at, kChunk, 0, handle, 0));
  REQUIRE_OK(pc.allow(at));
  std::vector<unsigned char> seen(kChunk);
  CHECK_OK(pc.cu.cuMemcpyDtoH(seen.data(), at, kChunk));
  CHECK(seen == written);
  CHECK_OK(pc.cu.cuMemRelease(handle));
  CHECK_OK(pc.cu.cuMemUnmap(at, kChunk));
  CHECK_EQ(pc.cu.cuMemRetainAllocationHandle(&handle, reinterpret_cast<void*>(at)),
           CUDA_ERROR_INVALID_VALUE);
  CHECK_OK(pc.cu.cuMemAddressFree(at, kChunk));
}

TEST(host_memory_is_registered_once) {
  const Computer pc;
  std::vector<unsigned char> host(4 * kMiB);
  auto* const begin = host.data();
  REQUIRE_OK(pc.cu.cuMemHostRegister(begin, kMiB, 0));
  CHECK_EQ(pc.cu.cuMemHostRegister(begin, kMiB, 0), CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED);
  CHECK_EQ(pc.cu.cuMemHostRegister(begin + kMiB / 2, kMiB, 0),
           CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED);
  CHECK_EQ(pc.cu.cuMemHostUnregister(begin + 2 * kMiB), CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED);
  CHECK_OK(pc.cu.cuMemHostUnregister(begin));
  CHECK_EQ(pc.cu.cuMemHostUnregister(begin), CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED);
  CHECK_EQ(pc.cu.cuMemHostRegister(nullptr, kMiB, 0), CUDA_ERROR_INVALID_VALUE);
  CHECK_EQ(pc.cu.cuMemHostRegister(begin, 0, 0), CUDA_ERROR_INVALID_VALUE);
}

TEST(addresses_say_what_lies_there) {
  const Computer pc;
  const Chunk chunk(pc);
  unsigned type = 0;
  CHECK_OK(pc.cu.cuPointerGetAttribute(&type, CU_POINTER_ATTRIBUTE_MEMORY_TYPE, chunk.pointer));
  CHECK_EQ(type, static_cast<unsigned>(CU_MEMORYTYPE_DEVICE));
  CUdeviceptr begin = 0;
  std::size_t bytes = 0;
  CHECK_OK(pc.cu.cuMemGetAddressRange(&begin, &bytes, chunk.pointer + 100));
  CHECK_EQ(begin, chunk.pointer);
  CHECK_EQ(bytes, kChunk);
}

TEST(plain_memory_is_apart_from_virtual_memory) {
  const Computer pc;
  CUdeviceptr at = 0;
  REQUIRE_OK(pc.cu.cuMemAlloc(&at, 3 * kMiB));
  const auto written = pattern(3 * kMiB, 3);
  CHECK_OK(pc.cu.cuMemcpyHtoD(at, written.data(), written.size()));
  std::vector<unsigned char> seen(written.size());
  CHECK_OK(pc.cu.cuMemcpyDtoH(seen.data(), at, seen.size()));
  CHECK(seen == written);
  CHECK_EQ(pc.cu.cuMemUnmap(at, 4 * kMiB), CUDA_ERROR_INVALID_VALUE);
  CHECK_EQ(pc.cu.cuMemAddressFree(at, 4 * kMiB), CUDA_ERROR_INVALID_VALUE);
  CHECK_EQ(pc.cu.cuMemFree(at + 4096), CUDA_ERROR_INVALID_VALUE);
  CHECK_OK(pc.cu.cuMemFree(at));
}

TEST(free_memory_goes_down_and_up) {
  const Computer pc;
  std::size_t before = 0;
  std::size_t during = 0;
  std::size_t after = 0;
  std::size_t total = 0;
  REQUIRE_OK(pc.cu.cuMemGetInfo(&before, &total));
  const auto handle = pc.create(16 * kMiB);
  REQUIRE_OK(pc.cu.cuMemGetInfo(&during, &total));
  CHECK_OK(pc.cu.cuMemRelease(handle));
  REQUIRE_OK(pc.cu.cuMemGetInfo(&after, &total));
  CHECK_EQ(before - during, 16 * kMiB);
  CHECK_EQ(after, before);
}

}  // namespace
