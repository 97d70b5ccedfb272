// Are backups of segments that are awake kept, counted, trusted and dropped as asked?

#include "warm_segment.h"

namespace {

using rig::CleanCheck;
using rig::DigestRig;
using rig::Range;
using rig::Rig;
using rig::Warm;

TEST(kept_backups_are_counted) {
  DigestRig r;
  {
    Warm segment(2 * kChunk, {{0, kChunk}}, r);
    CHECK(!r.asleep(segment.at));
    CHECK_EQ(r.info(segment.at).backup_bytes, kChunk);
    CHECK_EQ(r.allocator->host().usage().used_bytes, kChunk);
    CHECK_EQ(r.allocator->host().usage().held_bytes, kChunk);
    CHECK_EQ(segment.cycle(), std::size_t{0});
    CHECK_EQ(r.allocator->host().usage().held_bytes, kChunk);
  }
  CHECK_EQ(r.allocator->host().usage().used_bytes, std::size_t{0});
  r.expect_empty();
}

TEST(release_host_drops_the_backups_of_awake_segments_only) {
  DigestRig r;
  Warm awake(kChunk, {{0, kChunk}}, r, 1);
  Warm sleeper(2 * kChunk, {{0, 2 * kChunk}}, r, 2);
  REQUIRE(r.sleep({sleeper.plan()}).ok());
  // Pieces of the arena are 3 MiB, so part of one may stay in use.
  const std::size_t released = r.allocator->release_host();
  CHECK_EQ(r.allocator->host().usage().used_bytes, 2 * kChunk);
  CHECK_EQ(r.allocator->host().usage().held_bytes + released, 3 * kChunk);
  CHECK_EQ(r.info(awake.at).backup_bytes, std::size_t{0});
  CHECK(r.allocator->verify().ok());
  CHECK_EQ(awake.cycle(), kChunk);
  REQUIRE(r.wake({sleeper.at}).ok());
  sleeper.expect_bytes();
  CHECK_EQ(r.allocator->release_host() > 0, true);
  CHECK_EQ(r.allocator->host().usage().held_bytes, std::size_t{0});
  CHECK_EQ(r.computer.ledger().host_registrations, r.start.host_registrations);
  CHECK_EQ(sleeper.cycle(), 2 * kChunk);
  CHECK_EQ(sleeper.cycle(), std::size_t{0});
}

TEST(release_host_breaks_no_capture) {
  DigestRig r;
  Warm segment(kChunk, {{0, kChunk}}, r);
  void* stream = r.computer.cu.cumem_emulator_stream_create(r.computer.machine, 0, 1);
  REQUIRE(r.computer.cu.cumem_emulator_begin_capture(stream) == 0);
  CHECK_EQ(r.allocator->release_host(), kChunk);
  CHECK_EQ(r.computer.ledger().host_registrations, r.start.host_registrations);
  CHECK_EQ(r.computer.cu.cumem_emulator_end_capture(stream), 0);
  r.computer.cu.cumem_emulator_stream_destroy(stream);
}

TEST(an_allocator_that_ends_breaks_no_capture) {
  DigestRig r;
  void* stream = r.computer.cu.cumem_emulator_stream_create(r.computer.machine, 0, 1);
  {
    Warm segment(kChunk, {{0, kChunk}}, r);
  }
  REQUIRE(r.computer.cu.cumem_emulator_begin_capture(stream) == 0);
  r.allocator.reset();
  CHECK_EQ(r.computer.ledger().host_registrations, std::uint64_t{0});
  CHECK_EQ(r.computer.ledger().modules, std::uint64_t{0});
  CHECK_EQ(r.computer.cu.cumem_emulator_end_capture(stream), 0);
  r.computer.cu.cumem_emulator_stream_destroy(stream);
}

TEST(nothing_is_kept_where_that_is_not_wanted) {
  rig::Config config = rig::small_chunks();
  config.host.retain = false;
  DigestRig r(config);
  Warm segment(kChunk, {{0, kChunk}}, r);
  CHECK_EQ(r.allocator->host().usage().held_bytes, std::size_t{0});
  CHECK_EQ(segment.cycle(), kChunk);
}

TEST(kept_backups_make_room_for_a_sleep_that_needs_it) {
  rig::Config config = rig::small_chunks();
  config.host.limit_bytes = 3 * kChunk;
  DigestRig r(config);
  Warm kept(2 * kChunk, {{0, 2 * kChunk}}, r, 1);
  const CUdeviceptr other = r.make(2 * kChunk);
  const auto data = Rig::pattern(2 * kChunk, 2);
  r.write(other, data);
  REQUIRE(r.sleep({Rig::whole(other, 2 * kChunk)}).ok());
  CHECK_EQ(r.info(kept.at).backup_bytes, std::size_t{0});
  kept.expect_bytes();
  REQUIRE(r.wake({other}).ok());
  CHECK(r.read(other, 2 * kChunk) == data);
  CHECK_EQ(kept.cycle(), 2 * kChunk);
  r.allocator->free(other);
}

TEST(a_sleep_that_finds_no_host_memory_at_all_changes_nothing) {
  rig::Config config = rig::small_chunks();
  config.host.limit_bytes = 3 * kChunk;
  DigestRig r(config);
  Warm kept(2 * kChunk, {{0, 2 * kChunk}}, r, 1);
  const CUdeviceptr other = r.make(4 * kChunk);
  CHECK(r.sleep({kept.plan(), Rig::whole(other, 4 * kChunk)}).fault == cumem::Fault::host_memory);
  CHECK(!r.asleep(kept.at) && !r.asleep(other));
  kept.expect_bytes();
  CHECK(r.allocator->verify().ok());
  kept.change(5);
  kept.cycle();
  r.allocator->free(other);
}

TEST(never_copies_everything) {
  DigestRig r;
  Warm segment(2 * kChunk, {{0, 2 * kChunk}}, r);
  CHECK_EQ(segment.cycle(CleanCheck::never), 2 * kChunk);
  CHECK(!r.slept.digested);
  segment.change(7);
  CHECK_EQ(segment.cycle(CleanCheck::digest), 2 * kChunk);  // its digests are not known
  CHECK_EQ(segment.cycle(CleanCheck::digest), std::size_t{0});
}

TEST(a_declaration_is_taken_at_its_word) {
  DigestRig r;
  Warm segment(3 * kChunk, {{0, 3 * kChunk}}, r);
  const auto declare = [&](std::vector<Range> offsets) {
    rig::SegmentPlan plan = segment.plan();
    for (const Range& range : offsets)
      plan.unchanged.push_back({segment.at + range.address, range.bytes});
    CHECK(r.sleep({plan}, CleanCheck::declared).ok());
    const std::size_t copied = r.slept.copied_bytes;
    CHECK(r.wake({segment.at}).ok());
    segment.expect_bytes();
    return copied;
  };
  CHECK_EQ(declare({{0, 3 * kChunk}}), std::size_t{0});
  segment.change(kChunk + 1);
  CHECK_EQ(declare({{0, kChunk}, {2 * kChunk, kChunk}}), kChunk);
  CHECK_EQ(declare({{512, kChunk}}), 3 * kChunk);  // no whole piece is declared
  CHECK_EQ(declare({}), 3 * kChunk);
  segment.change(0);
  CHECK_EQ(segment.cycle(CleanCheck::digest), 3 * kChunk);  // digests were not kept up
  segment.change(0);
  CHECK_EQ(segment.cycle(CleanCheck::digest), cumem::kDigestBytes);
}

TEST(a_false_declaration_brings_old_bytes_back) {
  DigestRig r;
  Warm segment(kChunk, {{0, kChunk}}, r);
  segment.change(9);
  rig::SegmentPlan plan = segment.plan();
  plan.unchanged = plan.backup;
  REQUIRE(r.sleep({plan}, CleanCheck::declared).ok());
  REQUIRE(r.wake({segment.at}).ok());
  segment.data[9] ^= 0x40;
  segment.expect_bytes();
}

TEST(a_declaration_about_a_segment_without_backup_means_nothing) {
  DigestRig r;
  const CUdeviceptr at = r.make(kChunk);
  const auto data = Rig::pattern(kChunk, 4);
  r.write(at, data);
  rig::SegmentPlan plan = Rig::whole(at, kChunk);
  plan.unchanged = plan.backup;
  REQUIRE(r.sleep({plan}, CleanCheck::declared).ok());
  CHECK_EQ(r.slept.copied_bytes, kChunk);
  REQUIRE(r.wake({at}).ok());
  CHECK(r.read(at, kChunk) == data);
  r.allocator->free(at);
}

TEST(declarations_need_no_digester) {
  Rig r;
  Warm segment(kChunk, {{0, kChunk}}, r);
  rig::SegmentPlan plan = segment.plan();
  plan.unchanged = plan.backup;
  REQUIRE(r.sleep({plan}, CleanCheck::declared).ok());
  CHECK_EQ(r.slept.copied_bytes, std::size_t{0});
  REQUIRE(r.wake({segment.at}).ok());
  segment.expect_bytes();
  CHECK_EQ(segment.cycle(), kChunk);
  CHECK_EQ(segment.cycle(), kChunk);
}

}  // namespace
