// Do segments grow and shrink where they are, whatever fails on the way?

#include "core_rig.h"
#include "failures.h"

namespace {

using cumem::Extent;
using cumem::Fault;
using rig::Owner;
using rig::Range;
using rig::Rig;
using rig::Status;

constexpr std::size_t kCapacity = 8 * kChunk;

// Two segments of two chunks each, with room for eight.
struct Growing {
  Rig r{128 * kMiB};
  CUdeviceptr a = make();
  CUdeviceptr b = make();
  std::vector<unsigned char> data_a = Rig::pattern(2 * kChunk, 1);
  std::vector<unsigned char> data_b = Rig::pattern(2 * kChunk, 2);

  Growing() {
    r.write(a, data_a);
    r.write(b, data_b);
  }
  CUdeviceptr make() {
    CUdeviceptr address = 0;
    REQUIRE(r.allocator
                ->malloc(Extent{2 * kChunk, kChunk, kCapacity}, 0, nullptr,
                         Owner{"kv_cache", "offload", 0, false}, address)
                .ok());
    return address;
  }
  Status resize(std::size_t bytes) { return r.allocator->resize({{{a, bytes}, {b, bytes}}}); }
  void expect_bytes(std::size_t each) {
    for (CUdeviceptr at : {a, b}) {
      CHECK_EQ(r.info(at).bytes, each);
      CHECK_EQ(r.info(at).mapped_bytes, each);
      CHECK(r.allocator->is_awake(at, each));
      CHECK(!r.allocator->is_awake(at, each + 1));
    }
    CHECK(r.allocator->verify().ok());
  }
  void expect_contents(std::size_t bytes) {
    const auto first = [bytes](std::vector<unsigned char> data) {
      data.resize(bytes);
      return data;
    };
    CHECK(r.read(a, bytes) == first(data_a));
    CHECK(r.read(b, bytes) == first(data_b));
  }
  std::uint64_t used() { return r.computer.cu.cumem_emulator_used_bytes(r.computer.machine, 0); }
  void expect_clean_end() {
    r.allocator->free(a);
    r.allocator->free(b);
    CHECK_EQ(r.allocator->live_segments(), std::size_t{0});
    r.expect_empty();
  }
};

TEST(segments_grow_and_shrink_where_they_are) {
  Growing g;
  CHECK_EQ(g.used(), std::uint64_t{4 * kChunk});
  REQUIRE(g.resize(5 * kChunk).ok());
  g.expect_bytes(5 * kChunk);
  g.expect_contents(2 * kChunk);
  CHECK_EQ(g.used(), std::uint64_t{10 * kChunk});
  const auto more = Rig::pattern(3 * kChunk, 3);
  g.r.write(g.a + 2 * kChunk, more);
  CHECK(g.r.read(g.a + 2 * kChunk, 3 * kChunk) == more);
  REQUIRE(g.resize(kChunk).ok());
  g.expect_bytes(kChunk);
  g.expect_contents(kChunk);
  CHECK_EQ(g.used(), std::uint64_t{2 * kChunk});
  g.expect_clean_end();
}

TEST(a_size_is_rounded_up_to_whole_chunks_and_asked_bytes_are_exact) {
  Growing g;
  REQUIRE(g.resize(2 * kChunk + 1).ok());
  g.expect_bytes(3 * kChunk);
  CHECK_EQ(g.r.info(g.a).asked_bytes, 2 * kChunk + 1);
  REQUIRE(g.resize(kChunk + 1).ok());
  g.expect_bytes(2 * kChunk);
  REQUIRE(g.resize(2 * kChunk).ok());
  g.expect_bytes(2 * kChunk);
  REQUIRE(g.resize(kCapacity).ok());
  g.expect_bytes(kCapacity);
  g.expect_clean_end();
}

TEST(what_was_resized_sleeps_and_wakes_with_the_size_it_has) {
  Growing g;
  REQUIRE(g.resize(3 * kChunk).ok());
  const auto more = Rig::pattern(3 * kChunk, 7);
  g.r.write(g.a, more);
  REQUIRE(g.r.sleep({Rig::whole(g.a, 3 * kChunk), {g.b, {}}}).ok());
  CHECK_EQ(g.used(), std::uint64_t{0});
  CHECK(g.r.allocator->verify().ok());
  CHECK(g.resize(kChunk).fault == Fault::invalid);
  CHECK_EQ(g.r.info(g.a).bytes, 3 * kChunk);
  REQUIRE(g.r.wake({g.a, g.b}).ok());
  g.expect_bytes(3 * kChunk);
  CHECK(g.r.read(g.a, 3 * kChunk) == more);
  CHECK(g.r.info(g.a).backup_bytes > 0);
  REQUIRE(g.resize(kChunk).ok());
  CHECK_EQ(g.r.info(g.a).backup_bytes, std::size_t{0});
  REQUIRE(g.r.sleep({Rig::whole(g.a, kChunk), {g.b, {}}}).ok());
  REQUIRE(g.r.wake({g.a, g.b}).ok());
  CHECK(g.r.read(g.a, kChunk) == std::vector<unsigned char>(more.begin(), more.begin() + kChunk));
  g.expect_clean_end();
}

TEST(a_wrong_request_changes_nothing) {
  Growing g;
  CHECK(g.resize(0).fault == Fault::invalid);
  CHECK(g.resize(kCapacity + 1).fault == Fault::invalid);
  CHECK(g.r.allocator->resize({{{g.a, kChunk}, {g.a, kChunk}}}).fault == Fault::invalid);
  CHECK(g.r.allocator->resize({{{g.a, kChunk}, {g.b + 1, kChunk}}}).fault == Fault::invalid);
  g.expect_bytes(2 * kChunk);
  g.expect_contents(2 * kChunk);
  g.expect_clean_end();
}

TEST(growth_without_room_says_what_is_free_and_changes_nothing) {
  Growing g;
  const CUdeviceptr filler = g.r.make(128 * kMiB - 8 * kChunk);
  const Status status = g.resize(kCapacity);
  CHECK(status.fault == Fault::device_memory);
  CHECK_EQ(status.free_bytes, 4 * kChunk);
  g.expect_bytes(2 * kChunk);
  g.expect_contents(2 * kChunk);
  REQUIRE(g.resize(4 * kChunk).ok());
  g.r.allocator->free(filler);
  g.expect_clean_end();
}

TEST(growth_leaves_the_margin_free) {
  Growing g;
  rig::Config config = rig::small_chunks();
  config.margin_bytes = 128 * kMiB - 8 * kChunk;
  g.r.allocator->configure(config);
  CHECK(g.resize(5 * kChunk).fault == Fault::device_memory);
  g.expect_bytes(2 * kChunk);
  REQUIRE(g.resize(4 * kChunk).ok());
  g.expect_bytes(4 * kChunk);
  REQUIRE(g.resize(kChunk).ok());
  g.expect_clean_end();
}

TEST(a_capture_is_not_broken) {
  Growing g;
  cumem::Device* device = nullptr;
  REQUIRE(g.r.allocator->device(0, &device).ok());
  void* stream = g.r.computer.cu.cumem_emulator_stream_create(g.r.computer.machine, 0, 1);
  device->watch({static_cast<CUstream>(stream)});
  REQUIRE(g.r.computer.cu.cumem_emulator_begin_capture(stream) == 0);
  CHECK(g.resize(kChunk).fault == Fault::capture);
  CHECK(g.resize(kCapacity).fault == Fault::capture);
  CHECK_EQ(g.r.computer.cu.cumem_emulator_end_capture(stream), 0);
  g.expect_bytes(2 * kChunk);
  g.expect_clean_end();
  g.r.computer.cu.cumem_emulator_stream_destroy(stream);
}

// Every driver call of a resize, failed once: growth is all or nothing, what shrinks
// is exactly as large as it says, and the same call then goes on.
void fail_each_call_of(std::size_t target, bool all_or_nothing) {
  for (const char* call : {"cuMemCreate", "cuMemMap", "cuMemSetAccess", "cuMemUnmap",
                           "cuMemRelease", "cuCtxSynchronize", "cuCtxPushCurrent"}) {
    for (long nth = 1;; ++nth) {
      Growing g;
      const long before = rig::calls_of(g.r, call);
      rig::fail_call(g.r, call, nth);
      const Status status = g.resize(target);
      const long made = rig::calls_of(g.r, call) - before;
      g.r.computer.cu.cumem_emulator_clear(g.r.computer.machine);
      CHECK(g.r.allocator->verify().ok());
      g.expect_contents(std::min(target, 2 * kChunk));
      if (!status.ok() && all_or_nothing) g.expect_bytes(2 * kChunk);
      REQUIRE(g.resize(target).ok());
      g.expect_bytes(target);
      g.expect_contents(std::min(target, 2 * kChunk));
      g.r.allocator->free(g.a);
      g.r.allocator->free(g.b);
      CHECK_EQ(g.r.allocator->live_segments(), std::size_t{0});
      if (made < nth) break;  // it is not called so often
    }
  }
}

TEST(every_failure_of_growth_changes_nothing_and_a_retry_succeeds) {
  fail_each_call_of(4 * kChunk, true);
}

TEST(every_failure_of_shrinking_leaves_an_exact_state_and_a_retry_succeeds) {
  fail_each_call_of(kChunk, false);
}

TEST(a_grown_segment_that_is_freed_asleep_leaves_nothing) {
  Growing g;
  REQUIRE(g.resize(kCapacity).ok());
  REQUIRE(g.r.sleep({Rig::whole(g.a, kCapacity), {g.b, {}}}).ok());
  g.expect_clean_end();
}

}  // namespace
