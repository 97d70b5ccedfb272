// How much memory can the host still give?
#include <algorithm>
#include <fstream>
#include <limits>
#include <string>

#include "core/host_piece.h"

namespace cumem {
namespace {

constexpr std::size_t kUnknown = std::numeric_limits<std::size_t>::max();

// The number after `key` in a file of "key value" lines, or kUnknown.
std::size_t keyed(const char* path, const std::string& key) {
  std::ifstream file(path);
  std::string word;
  std::size_t value = 0;
  while (file >> word)
    if (word == key && file >> value) return value;
  return kUnknown;
}

std::size_t single(const char* path) {
  std::ifstream file(path);
  std::size_t value = 0;
  return file >> value ? value : kUnknown;
}

// What the control group of this process still allows; page cache that is not
// in use counts as free, as the kernel reclaims it first.
std::size_t group_allows() {
  const std::size_t limit = single("/sys/fs/cgroup/memory.max");
  const std::size_t used = single("/sys/fs/cgroup/memory.current");
  if (limit == kUnknown || used == kUnknown) return kUnknown;
  const std::size_t cache = keyed("/sys/fs/cgroup/memory.stat", "inactive_file");
  const std::size_t held = cache == kUnknown ? used : used - std::min(used, cache);
  return limit - std::min(limit, held);
}

}  // namespace

std::size_t available_host_bytes() noexcept {
  const std::size_t kib = keyed("/proc/meminfo", "MemAvailable:");
  const std::size_t system = kib == kUnknown ? kUnknown : kib * 1024;
  return std::min(system, group_allows());
}

}  // namespace cumem
