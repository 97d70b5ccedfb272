// Does a sleep copy exactly the pieces that changed, and does everything come back?

#include "warm_segment.h"

namespace {

using cumem::kDigestBytes;
using rig::DigestRig;
using rig::Range;
using rig::Rig;
using rig::Warm;

TEST(an_unchanged_segment_is_not_copied_again) {
  DigestRig r;
  {
    Warm segment(5 * kChunk, {{0, 5 * kChunk}}, r);
    for (int round = 0; round < 3; ++round) {
      CHECK_EQ(segment.cycle(), std::size_t{0});
      CHECK(r.slept.digested);
      CHECK_EQ(r.slept.freed_bytes, 5 * kChunk);
      CHECK_EQ(r.woken.restored_bytes, 5 * kChunk);
      CHECK(r.allocator->verify().ok());
    }
  }
  r.expect_empty();
}

TEST(a_changed_byte_costs_the_piece_that_it_is_in) {
  DigestRig r;
  const std::size_t tail = kMiB + 48;
  const std::size_t first = 512;                     // of a range of two pieces and a tail
  const std::size_t last = 2 * kDigestBytes + tail;  // its length
  const std::size_t second = 6 * kMiB;               // of a range of one piece, to the end
  Warm segment(4 * kChunk, {{0, 16}, {first, last}, {second, 2 * kMiB}}, r);
  const std::vector<std::pair<std::size_t, std::size_t>> places = {
      {0, 16},                                   // the segment's first byte
      {15, 16},                                  // a range's last
      {first, kDigestBytes},                     // a range's first
      {first + 1, kDigestBytes},                 // an odd place
      {first + kDigestBytes - 1, kDigestBytes},  // a piece's last
      {first + kDigestBytes, kDigestBytes},      // the next one's first
      {first + kDigestBytes + 777777, kDigestBytes},
      {first + 2 * kDigestBytes, tail},
      {first + last - 1, tail},
      {second, kDigestBytes},
      {4 * kChunk - 1, kDigestBytes}};  // the segment's last byte
  for (const auto& [offset, copied] : places) {
    segment.change(offset);
    CHECK_EQ(segment.cycle(), copied);
    CHECK_EQ(segment.cycle(), std::size_t{0});
  }
  for (const auto& place : places) segment.change(place.first);
  CHECK_EQ(segment.cycle(), segment.backed());
}

TEST(a_change_between_the_ranges_costs_nothing) {
  DigestRig r;
  Warm segment(kChunk, {{0, 512}, {1024, 512}}, r);
  segment.change(512);
  segment.change(1023);
  segment.change(1536);
  CHECK_EQ(segment.cycle(), std::size_t{0});
}

TEST(a_last_word_that_is_not_whole_is_looked_at) {
  DigestRig r;
  Warm segment(kChunk, {{0, 101}, {512, 16 + 9}}, r);
  for (const std::size_t offset : {96, 99, 100}) {
    segment.change(offset);
    CHECK_EQ(segment.cycle(), std::size_t{101});
  }
  segment.change(512 + 16 + 8);
  CHECK_EQ(segment.cycle(), std::size_t{25});
}

TEST(more_pieces_than_a_batch_has) {
  DigestRig r;
  std::vector<Range> offsets;
  for (std::size_t i = 0; i < 1100; ++i) offsets.push_back({i * 1024, 512});
  Warm segment(kChunk, offsets, r);
  CHECK_EQ(segment.cycle(), std::size_t{0});
  for (const std::size_t piece : {0, 511, 512, 1023, 1024, 1099})
    segment.change(piece * 1024 + piece % 512);
  CHECK_EQ(segment.cycle(), std::size_t{6 * 512});
  CHECK_EQ(segment.cycle(), std::size_t{0});
}

TEST(exactly_one_batch_and_exactly_two) {
  DigestRig r;
  for (const std::size_t count : {512, 1024}) {
    std::vector<Range> offsets;
    for (std::size_t i = 0; i < count; ++i) offsets.push_back({i * 1024, 512});
    Warm segment(kChunk, offsets, r);
    CHECK_EQ(segment.cycle(), std::size_t{0});
    segment.change((count - 1) * 1024);
    CHECK_EQ(segment.cycle(), std::size_t{512});
  }
}

// A range that does not start at a multiple of 16 cannot be digested.
TEST(ranges_at_odd_addresses_are_copied_whole) {
  DigestRig r;
  Warm segment(kChunk, {{0, 512}, {1000, 24}}, r);
  CHECK_EQ(segment.cycle(), std::size_t{536});
  segment.change(1001);
  CHECK_EQ(segment.cycle(), std::size_t{536});
}

TEST(segments_keep_their_backups_apart) {
  DigestRig r;
  Warm a(2 * kChunk, {{0, 2 * kChunk}}, r, 1);
  Warm b(3 * kChunk, {{512, kChunk}}, r, 2);
  Warm c(kChunk, {{0, kChunk}}, r, 3);
  b.change(512);
  c.change(kChunk - 1);
  REQUIRE(r.sleep({a.plan(), b.plan(), c.plan()}).ok());
  CHECK_EQ(r.slept.copied_bytes, 2 * kChunk);
  REQUIRE(r.wake({c.at, a.at, b.at}).ok());
  for (Warm* segment : {&a, &b, &c}) segment->expect_bytes();
  a.change(kChunk);
  CHECK_EQ(a.cycle(), kDigestBytes);  // alone, while the others are awake
  REQUIRE(r.sleep({c.plan(), b.plan(), a.plan()}).ok());
  CHECK_EQ(r.slept.copied_bytes, std::size_t{0});
  REQUIRE(r.wake({a.at, b.at, c.at}).ok());
  for (Warm* segment : {&a, &b, &c}) segment->expect_bytes();
}

TEST(other_ranges_than_last_time_are_copied_whole) {
  DigestRig r;
  Warm segment(3 * kChunk, {{0, 2 * kChunk}}, r);
  const std::vector<std::vector<Range>> plans = {
      {{0, 3 * kChunk}}, {{512, 2 * kChunk}}, {{512, kChunk}, {512 + kChunk, kChunk}}, {{0, 512}}};
  for (const std::vector<Range>& offsets : plans) {
    segment.data = Rig::pattern(3 * kChunk, 9);  // a wake leaves what is in no range undefined
    r.write(segment.at, segment.data);
    segment.ranges = offsets;
    for (Range& range : segment.ranges) range.address += segment.at;
    CHECK_EQ(segment.cycle(), segment.backed());
    CHECK_EQ(segment.cycle(), std::size_t{0});
    CHECK_EQ(r.allocator->host().usage().used_bytes, segment.backed());
  }
}

TEST(a_discarding_sleep_ends_a_kept_backup) {
  DigestRig r;
  Warm segment(kChunk, {{0, kChunk}}, r);
  REQUIRE(r.sleep({{segment.at, {}}}).ok());
  CHECK_EQ(r.allocator->host().usage().used_bytes, std::size_t{0});
  REQUIRE(r.wake({segment.at}, 0).ok());
  segment.data.assign(kChunk, 0);
  CHECK_EQ(segment.cycle(), kChunk);
}

TEST(late_work_on_another_stream_is_noticed) {
  DigestRig r;
  Warm segment(2 * kChunk, {{0, 2 * kChunk}}, r);
  void* stream = r.computer.cu.cumem_emulator_stream_create(r.computer.machine, 0, 1);
  const std::size_t offset = kDigestBytes + 12345;
  segment.data[offset] ^= 1;
  CHECK_EQ(r.computer.cu.cumem_emulator_enqueue_write(
               r.computer.machine, stream, segment.at + offset, &segment.data[offset], 1, 30000),
           0);
  CHECK_EQ(segment.cycle(), kDigestBytes);
  r.computer.cu.cumem_emulator_stream_destroy(stream);
}

TEST(each_device_digests_its_own) {
  Rig r(64 * kMiB, rig::small_chunks(), 2);
  r.load_digester(0);
  std::vector<CUdeviceptr> at = {r.make(kChunk, "weights", 0), r.make(2 * kChunk, "weights", 1)};
  const auto sleep = [&] {
    return r.sleep({Rig::whole(at[0], kChunk), Rig::whole(at[1], 2 * kChunk)});
  };
  REQUIRE(sleep().ok() && r.wake(at).ok());
  REQUIRE(sleep().ok() && r.wake(at).ok());
  CHECK_EQ(r.slept.copied_bytes, 2 * kChunk);  // the second device has no digester yet
  CHECK(!r.slept.digested);
  r.load_digester(1);
  REQUIRE(sleep().ok() && r.wake(at).ok());
  CHECK_EQ(r.slept.copied_bytes, 2 * kChunk);  // nothing was known about it
  REQUIRE(sleep().ok() && r.wake(at).ok());
  CHECK_EQ(r.slept.copied_bytes, std::size_t{0});
  CHECK(r.slept.digested);
  for (const CUdeviceptr address : at) r.allocator->free(address);
  r.expect_empty();
}

}  // namespace
