// What do tests of kept backups work with?
#pragma once

#include <algorithm>
#include <utility>
#include <vector>

#include "core/transfer.h"
#include "core_rig.h"

namespace rig {

// A segment whose backup is kept: it slept and woke once.
class Warm {
 public:
  Warm(std::size_t bytes, std::vector<Range> offsets, Rig& on, unsigned seed = 1)
      : rig(on), at(rig.make(bytes)), data(Rig::pattern(bytes, seed)), ranges(std::move(offsets)) {
    for (Range& range : ranges) range.address += at;
    rig.write(at, data);
    REQUIRE(rig.sleep({plan()}).ok());
    REQUIRE(rig.wake({at}).ok());
  }
  ~Warm() { rig.allocator->free(at); }
  Warm(const Warm&) = delete;
  Warm& operator=(const Warm&) = delete;

  SegmentPlan plan() const { return {at, ranges}; }
  std::size_t backed() const { return cumem::total_bytes(ranges); }
  void change(std::size_t offset) {
    data[offset] ^= 0x40;
    rig.write(at + offset, {data[offset]});
  }
  // Sleeps and wakes; what the sleep copied.
  std::size_t cycle(CleanCheck check = CleanCheck::digest) {
    CHECK(rig.sleep({plan()}, check).ok());
    const std::size_t copied = rig.slept.copied_bytes;
    CHECK(rig.wake({at}, 0xEE).ok());
    expect_bytes();
    return copied;
  }
  void expect_bytes() {
    const auto now = rig.read(at, data.size());
    for (const Range& range : ranges) {
      const auto first = static_cast<std::ptrdiff_t>(range.address - at);
      const auto last = first + static_cast<std::ptrdiff_t>(range.bytes);
      CHECK(std::equal(now.begin() + first, now.begin() + last, data.begin() + first));
    }
  }

  Rig& rig;
  const CUdeviceptr at;
  std::vector<unsigned char> data;
  std::vector<Range> ranges;  // addresses
};

struct DigestRig : Rig {
  explicit DigestRig(Config config = small_chunks()) : Rig(128 * kMiB, config) { load_digester(); }
};

}  // namespace rig
