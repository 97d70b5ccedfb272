// Read with the C library: numeric extraction of iostreams depends on which of
// several C++ runtimes in a Python process its locale objects come from.
#include "core/host_memory.h"

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <limits>
#include <memory>
#include <string>

namespace cumem {
namespace {

constexpr std::size_t kUnknown = std::numeric_limits<std::size_t>::max();

struct Close {
  void operator()(std::FILE* file) const noexcept { std::fclose(file); }
};

// The number that follows `key` at the start of a line; an empty key means the
// first line. kUnknown where there is no such file, line or number ("max").
std::size_t number_in(const std::string& path, const char* key) {
  std::unique_ptr<std::FILE, Close> file(std::fopen(path.c_str(), "re"));
  char line[256];
  const std::size_t length = std::strlen(key);
  while (file && std::fgets(line, sizeof(line), file.get()) != nullptr) {
    if (std::strncmp(line, key, length) != 0) continue;
    char* end = nullptr;
    const unsigned long long value = std::strtoull(line + length, &end, 10);
    return end == line + length ? kUnknown : value;
  }
  return kUnknown;
}

// Missing fields count as 0.
std::size_t sum_in(const std::string& path, const char* first, const char* second) {
  std::size_t sum = 0;
  for (const char* key : {first, second})
    if (const std::size_t value = number_in(path, key); value != kUnknown) sum += value;
  return sum;
}

// What one control group still allows. Pages of files count as used and as free: the kernel
// reclaims both its lists of them, active and inactive, before it refuses or kills. Pages of
// file systems in memory are on neither list, locked ones neither, pinned ones are.
std::size_t left_in(std::size_t limit, std::size_t used, std::size_t cache,
                    std::size_t pinned) noexcept {
  if (limit == kUnknown || used == kUnknown) return kUnknown;
  const std::size_t idle = cache - std::min(cache, pinned);
  const std::size_t held = used - std::min(used, idle);
  return limit - std::min(limit, held);
}

// The limit of this process's container: version 2 of control groups, or 1, whose own
// fields leave out the groups below while its limit and its use do not.
std::size_t group_allows(std::size_t pinned, const std::string& root) {
  const std::string v2 = root + "/sys/fs/cgroup/";
  const std::string v1 = root + "/sys/fs/cgroup/memory/";
  return std::min(
      left_in(number_in(v2 + "memory.max", ""), number_in(v2 + "memory.current", ""),
              sum_in(v2 + "memory.stat", "active_file ", "inactive_file "), pinned),
      left_in(number_in(v1 + "memory.limit_in_bytes", ""),
              number_in(v1 + "memory.usage_in_bytes", ""),
              sum_in(v1 + "memory.stat", "total_active_file ", "total_inactive_file "), pinned));
}

}  // namespace

std::size_t available_host_bytes(std::size_t pinned, const std::string& root) {
  const std::size_t kib = number_in(root + "/proc/meminfo", "MemAvailable:");
  const std::size_t system = kib == kUnknown ? kUnknown : kib * 1024 - std::min(kib * 1024, pinned);
  return std::min(system, group_allows(pinned, root));
}

}  // namespace cumem
