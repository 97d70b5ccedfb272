// What is a piece of the address space?
#pragma once

#include <cstddef>
#include <cstdint>

namespace cumem::emulator {

constexpr std::size_t kGranularity = std::size_t{2} << 20;

struct Range {
  std::uintptr_t begin = 0;
  std::size_t bytes = 0;

  std::uintptr_t end() const { return begin + bytes; }
  bool wraps() const { return end() < begin; }
  bool contains(const Range& other) const {
    return !other.wraps() && begin <= other.begin && other.end() <= end();
  }
  bool overlaps(const Range& other) const { return begin < other.end() && other.begin < end(); }
  bool operator==(const Range& other) const { return begin == other.begin && bytes == other.bytes; }
};

// A non-empty range that starts and ends on the granularity.
inline bool aligned(const Range& range) {
  return range.bytes != 0 && range.begin % kGranularity == 0 && range.bytes % kGranularity == 0 &&
         !range.wraps();
}

}  // namespace cumem::emulator
