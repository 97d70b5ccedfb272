// Can a backup be read while its segment sleeps, and is a margin of memory kept?

#include "core_rig.h"

namespace {

using rig::Rig;

constexpr std::size_t kPage = 4096;

struct Read {
  cumem::Status status;
  std::vector<unsigned char> bytes;
};

Read read_backup(Rig& r, CUdeviceptr at, std::size_t bytes) {
  Read read;
  read.bytes.resize(bytes);
  read.status =
      r.allocator->read_backup({at, bytes}, reinterpret_cast<std::byte*>(read.bytes.data()));
  return read;
}

TEST(a_backup_is_read_while_its_segment_sleeps) {
  Rig r;
  const std::size_t bytes = 3 * kChunk;
  const CUdeviceptr at = r.make(bytes);
  const std::vector<unsigned char> data = Rig::pattern(bytes, 5);
  r.write(at, data);
  // Two ranges: what is between them is discarded.
  REQUIRE(r.sleep({{at, {{at, kChunk}, {at + 2 * kChunk, kChunk}}}}).ok());
  const Read first = read_backup(r, at + kPage, kChunk - kPage);
  REQUIRE(first.status.ok());
  CHECK(std::equal(first.bytes.begin(), first.bytes.end(), data.begin() + kPage));
  const Read last = read_backup(r, at + 2 * kChunk + 3, kPage);
  REQUIRE(last.status.ok());
  CHECK(std::equal(last.bytes.begin(), last.bytes.end(), data.begin() + 2 * kChunk + 3));
  CHECK(r.asleep(at));
  REQUIRE(r.wake({at}).ok());
  CHECK(r.read(at, kChunk) == std::vector<unsigned char>(data.begin(), data.begin() + kChunk));
  r.allocator->free(at);
  r.expect_empty();
}

TEST(what_has_no_backup_is_said_to_have_none) {
  Rig r;
  const CUdeviceptr at = r.make(2 * kChunk);
  CHECK(read_backup(r, at, kPage).status.fault == cumem::Fault::invalid);  // awake
  REQUIRE(r.sleep({{at, {{at, kChunk}}}}).ok());
  CHECK(read_backup(r, at + kChunk, kPage).status.fault == cumem::Fault::invalid);
  CHECK(read_backup(r, at + kChunk - kPage, 2 * kPage).status.fault == cumem::Fault::invalid);
  CHECK(read_backup(r, 1, kPage).status.fault == cumem::Fault::invalid);  // not ours
  r.allocator->free(at);
  r.expect_empty();
}

TEST(malloc_leaves_the_margin_free) {
  rig::Config config = rig::small_chunks();
  config.margin_bytes = 16 * kMiB;
  Rig r(64 * kMiB, config);
  CUdeviceptr refused = 0;
  const CUdeviceptr at = r.make(40 * kMiB);
  const cumem::Status status = r.allocator->malloc(
      10 * kMiB, 0, nullptr, rig::Owner{"weights", "offload", 1, false}, refused);
  CHECK(status.fault == cumem::Fault::device_memory);
  CHECK_EQ(status.free_bytes, 24 * kMiB);
  CHECK_EQ(refused, CUdeviceptr{0});
  CHECK_EQ(r.allocator->counters().failed_mallocs, std::uint64_t{1});
  const CUdeviceptr fits = r.make(8 * kMiB);
  config.margin_bytes = 0;
  r.allocator->configure(config);
  const CUdeviceptr rest = r.make(16 * kMiB);
  for (const CUdeviceptr address : {at, fits, rest}) r.allocator->free(address);
  r.expect_empty();
}

TEST(a_wake_may_use_the_margin) {
  rig::Config config = rig::small_chunks();
  Rig r(64 * kMiB, config);
  const CUdeviceptr at = r.make(40 * kMiB);
  REQUIRE(r.sleep({Rig::whole(at, 40 * kMiB)}).ok());
  config.margin_bytes = 60 * kMiB;
  r.allocator->configure(config);
  CHECK(r.wake({at}).ok());
  r.allocator->free(at);
  r.expect_empty();
}

}  // namespace
