// What is a piece of device memory, and which part of a file does it mirror?
#pragma once

#include <cuda.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <vector>

#include "core/status.h"
#include "digest/digest.h"

namespace cumem {

struct Range {
  CUdeviceptr address = 0;
  std::size_t bytes = 0;
  CUdeviceptr end() const noexcept { return address + bytes; }
};

// A range whose bytes are those of a file, or of a block of host memory, from `offset` on.
struct FilePart {
  Range range;
  std::uint64_t offset = 0;
};

inline std::size_t total_bytes(const std::vector<FilePart>& parts) noexcept {
  std::size_t bytes = 0;
  for (const FilePart& part : parts) bytes += part.range.bytes;
  return bytes;
}

// Calls visit(piece, index, offset) -> Status for each piece of the ranges: at most
// kDigestBytes each, the offset counting from the start of the first range.
template <class Visit>
Status for_each_piece(const std::vector<Range>& ranges, const Visit& visit) {
  std::size_t index = 0;
  std::size_t offset = 0;
  for (const Range& range : ranges) {
    for (std::size_t done = 0; done < range.bytes; ++index) {
      const std::size_t bytes = std::min(kDigestBytes, range.bytes - done);
      Status status = visit(Range{range.address + done, bytes}, index, offset);
      if (!status.ok()) return status;
      done += bytes;
      offset += bytes;
    }
  }
  return {};
}

// Bytes in all ranges together.
inline std::size_t total_bytes(const std::vector<Range>& ranges) noexcept {
  std::size_t bytes = 0;
  for (const Range& range : ranges) bytes += range.bytes;
  return bytes;
}

// Is the piece wholly in one of the ranges?
inline bool covers(const std::vector<Range>& ranges, const Range& piece) noexcept {
  return std::any_of(ranges.begin(), ranges.end(), [&](const Range& range) {
    return range.address <= piece.address && piece.end() <= range.end();
  });
}

}  // namespace cumem
