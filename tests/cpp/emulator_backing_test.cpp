// Is emulated device memory real memory, of the right size, and gone when released?

#include <dirent.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <fstream>
#include <set>

#include "computer.h"

namespace {

// Can the process itself read the byte? Asked through the kernel, so no fault.
bool host_can_read(std::uintptr_t address) {
  int ends[2];
  if (pipe(ends) != 0) return false;
  const bool can = write(ends[1], reinterpret_cast<const void*>(address), 1) == 1;
  close(ends[0]);
  close(ends[1]);
  return can;
}

// How many files of device memory are open, and what the host spends on them.
struct DeviceFiles {
  std::size_t open = 0;
  std::size_t host_bytes = 0;
};

DeviceFiles look_at_files() {
  DeviceFiles files;
  DIR* const directory = opendir("/proc/self/fd");
  while (const dirent* entry = readdir(directory)) {
    char target[256] = "";
    const std::string path = std::string("/proc/self/fd/") + entry->d_name;
    if (readlink(path.c_str(), target, sizeof(target) - 1) < 0) continue;
    if (std::strstr(target, "cumem_emulated_device") == nullptr) continue;
    struct stat status{};
    if (stat(path.c_str(), &status) != 0) continue;
    ++files.open;
    files.host_bytes += static_cast<std::size_t>(status.st_blocks) * 512;
  }
  closedir(directory);
  return files;
}

std::size_t count_kernel_mappings(CUdeviceptr begin, std::size_t bytes) {
  std::ifstream maps("/proc/self/maps");
  std::size_t count = 0;
  for (std::string line; std::getline(maps, line);) {
    const CUdeviceptr start = std::stoull(line, nullptr, 16);
    if (start >= begin && start < begin + bytes) ++count;
  }
  return count;
}

TEST(capacity_is_the_limit_of_each_device) {
  const Emulated pc(8 * kMiB);
  std::size_t free = 0;
  std::size_t total = 0;
  CHECK_OK(pc.cu.cuMemGetInfo(&free, &total));
  CHECK_EQ(total, 8 * kMiB);
  const auto first = pc.create(6 * kMiB);
  CHECK_EQ(pc.cu.cumem_emulator_used_bytes(pc.machine, 0), 6 * kMiB);
  const CUmemAllocationProp prop = pc.prop();
  CUmemGenericAllocationHandle second = 0;
  CHECK_EQ(pc.cu.cuMemCreate(&second, 4 * kMiB, &prop, 0), CUDA_ERROR_OUT_OF_MEMORY);
  CUdeviceptr pointer = 0;
  CHECK_EQ(pc.cu.cuMemAlloc(&pointer, 3 * kMiB), CUDA_ERROR_OUT_OF_MEMORY);
  CHECK_OK(pc.cu.cuMemAlloc(&pointer, 1));
  CHECK_EQ(pc.cu.cumem_emulator_used_bytes(pc.machine, 0), 8 * kMiB);
  CHECK_OK(pc.cu.cuMemFree(pointer));
  CHECK_OK(pc.cu.cuMemRelease(first));
  CHECK_EQ(pc.cu.cumem_emulator_used_bytes(pc.machine, 0), 0u);
}

TEST(fresh_memory_has_no_zeros_and_no_period) {
  const Emulated pc;
  const Chunk first(pc);
  const Chunk second(pc);
  const auto one = first.contents();
  const auto two = second.contents();
  CHECK(std::count(one.begin(), one.end(), 0) == 0);
  CHECK(one != two);
  std::set<std::uint64_t> words;
  for (std::size_t i = 0; i < one.size(); i += 8) {
    std::uint64_t word = 0;
    std::memcpy(&word, &one[i], 8);
    words.insert(word);
  }
  CHECK(words.size() > one.size() / 8 / 100 * 99);
}

TEST(host_sees_device_memory_only_with_access) {
  const Emulated pc;
  const CUdeviceptr at = pc.reserve();
  CHECK(!host_can_read(at));
  const auto handle = pc.create();
  REQUIRE_OK(pc.cu.cuMemMap(at, kChunk, 0, handle, 0));
  CHECK(!host_can_read(at));
  REQUIRE_OK(pc.allow(at));
  CHECK(host_can_read(at + kChunk - 1));
  REQUIRE_OK(pc.cu.cuMemUnmap(at, kChunk));
  CHECK(!host_can_read(at));
  CHECK_OK(pc.cu.cuMemRelease(handle));
  CHECK_OK(pc.cu.cuMemAddressFree(at, kChunk));
}

TEST(neighbouring_chunks_are_one_mapping_to_the_kernel) {
  const Emulated pc(256 * kMiB);
  constexpr std::size_t kCount = 64;
  const CUdeviceptr at = pc.reserve(kCount * kChunk);
  std::vector<CUmemGenericAllocationHandle> handles;
  for (std::size_t i = 0; i < kCount; ++i) {
    handles.push_back(pc.create());
    REQUIRE_OK(pc.cu.cuMemMap(at + i * kChunk, kChunk, 0, handles.back(), 0));
    REQUIRE_OK(pc.allow(at + i * kChunk));
  }
  CHECK(count_kernel_mappings(at, kCount * kChunk) <= 2);
  CHECK_OK(pc.cu.cuMemUnmap(at, kCount * kChunk));
  for (const auto handle : handles) CHECK_OK(pc.cu.cuMemRelease(handle));
  CHECK_OK(pc.cu.cuMemAddressFree(at, kCount * kChunk));
}

TEST(released_memory_goes_back_to_the_host) {
  const Emulated pc;
  const DeviceFiles before = look_at_files();
  const auto kept = pc.create(4 * kMiB);
  const auto released = pc.create(8 * kMiB);
  CHECK_EQ(look_at_files().open, before.open + 1);
  CHECK_EQ(look_at_files().host_bytes, before.host_bytes + 12 * kMiB);
  CHECK_OK(pc.cu.cuMemRelease(released));
  CHECK_EQ(look_at_files().host_bytes, before.host_bytes + 4 * kMiB);
  CHECK_OK(pc.cu.cuMemRelease(kept));
  CHECK_EQ(look_at_files().open, before.open);
}

}  // namespace
