// Is a backup that is not what was put to sleep noticed, and what is left then?
#include <algorithm>
#include <cstdio>
#include <functional>

#include "failures.h"
#include "models.h"
#include "warm_segment.h"

namespace {

using cumem::CleanCheck;
using cumem::Fault;
using cumem::kDigestBytes;
using cumem::Status;
using rig::Part;
using rig::Range;
using rig::Rig;
using rig::SegmentPlan;

// The arena lies in private mappings that a fork does not copy; nothing else does.
void for_each_arena_mapping(const std::function<void(unsigned char*, unsigned char*)>& visit) {
  std::FILE* const maps = std::fopen("/proc/self/smaps", "re");
  REQUIRE(maps != nullptr);
  char line[512];
  unsigned long begin = 0;
  unsigned long end = 0;
  std::vector<std::pair<unsigned long, unsigned long>> found;
  while (std::fgets(line, sizeof(line), maps) != nullptr) {
    unsigned long bounds[2];
    if (std::sscanf(line, "%lx-%lx ", &bounds[0], &bounds[1]) == 2) {
      begin = bounds[0];
      end = bounds[1];
    }
    const auto has = [&](const char* flag) { return std::strstr(line, flag) != nullptr; };
    if (std::strncmp(line, "VmFlags:", 8) == 0 && has(" rd wr") && has(" dc") && !has(" sh"))
      found.emplace_back(begin, end);
  }
  std::fclose(maps);
  for (const auto& [first, last] : found)
    visit(reinterpret_cast<unsigned char*>(first), reinterpret_cast<unsigned char*>(last));
}

// Flips a bit of the backup that holds these bytes of `data`, behind the allocator's back.
// Arenas that outlived a dead context in an earlier test may hold them too; nobody reads those.
void damage(const std::vector<unsigned char>& data, std::size_t offset) {
  std::vector<unsigned char*> places;
  const std::size_t from = offset < 32 ? 0 : offset - 32;
  const auto first = data.begin() + static_cast<std::ptrdiff_t>(from);
  for_each_arena_mapping([&](unsigned char* begin, unsigned char* end) {
    for (auto at = std::search(begin, end, first, first + 64); at != end;
         at = std::search(at + 1, end, first, first + 64))
      places.push_back(at);
  });
  REQUIRE(!places.empty());
  for (unsigned char* const place : places) place[offset - from] ^= 0x10;
}

struct Scene {
  explicit Scene(bool digests = true, rig::Config config = rig::small_chunks())
      : r(64 * kMiB, config) {
    if (digests) r.load_digester();
    parts.emplace_back(r, 2 * kChunk + kMiB, 1);
    parts.emplace_back(r, kChunk, 2);
  }
  Status sleep(bool verify = true, CleanCheck check = CleanCheck::digest) {
    rig::SleepRequest request;
    for (const Part& part : parts) request.segments.push_back(part.plan());
    request.clean_check = check;
    request.verify = verify;
    slept = {};
    return r.allocator->sleep(request, slept);
  }
  Status wake(bool verify = true) {
    rig::WakeRequest request;
    for (const Part& part : parts) request.segments.push_back(part.at);
    request.verify = verify;
    woken = {};
    return r.allocator->wake(request, woken);
  }
  bool asleep() { return r.asleep(parts[0].at) && r.asleep(parts[1].at); }
  bool awake() { return !r.asleep(parts[0].at) && !r.asleep(parts[1].at); }
  void expect_bytes() {
    for (const Part& part : parts) CHECK(part.intact(r));
    CHECK(r.allocator->verify().ok());
  }
  void expect_end() {
    for (const Part& part : parts) r.allocator->free(part.at);
    r.expect_empty();
  }

  Rig r;
  std::vector<Part> parts;
  rig::SleepResult slept;
  rig::WakeResult woken;
};

TEST(what_is_whole_passes_with_and_without_digests) {
  for (const bool digests : {true, false}) {
    for (const CleanCheck check : {CleanCheck::digest, CleanCheck::never, CleanCheck::declared}) {
      Scene scene(digests);
      for (int round = 0; round < 2; ++round) {
        REQUIRE(scene.sleep(true, check).ok());
        CHECK_EQ(scene.slept.phases.count("verify"), std::size_t{1});
        REQUIRE(scene.wake().ok());
        CHECK_EQ(scene.woken.phases.count("verify"), std::size_t{1});
        scene.expect_bytes();
        scene.parts[0].change(scene.r, 7);
      }
      scene.expect_end();
    }
  }
}

TEST(a_flipped_bit_of_a_backup_is_caught_at_wake_and_the_backup_is_kept) {
  for (const bool digests : {true, false}) {
    const std::size_t size = 2 * kChunk + kMiB;
    for (const std::size_t offset : {std::size_t{0}, kDigestBytes - 1, kDigestBytes, size - 1}) {
      Scene scene(digests);
      REQUIRE(scene.sleep().ok());
      damage(scene.parts[0].data, std::min(offset, size - 33));
      const Status status = scene.wake();
      CHECK(status.fault == Fault::integrity);
      CHECK_EQ(status.address, scene.parts[0].at + offset / kDigestBytes * kDigestBytes);
      CHECK_EQ(status.device, 0);
      CHECK(scene.asleep());
      CHECK(scene.woken.segments.empty());
      CHECK_EQ(scene.r.info(scene.parts[0].at).backup_bytes, size);
      CHECK_EQ(scene.r.computer.ledger().handles, std::uint64_t{0});
      CHECK(scene.r.allocator->verify().ok());
      CHECK(scene.wake().fault == Fault::integrity);
      // The backup was kept: with the bit put right again, everything comes back.
      auto damaged = scene.parts[0].data;
      const std::size_t place = std::min(offset, size - 33);
      damaged[place] ^= 0x10;
      damage(damaged, place);
      REQUIRE(scene.wake().ok());
      scene.expect_bytes();
      scene.expect_end();
    }
  }
}

TEST(a_wake_that_is_not_to_verify_takes_the_backup_as_it_is) {
  Scene scene;
  REQUIRE(scene.sleep().ok());
  damage(scene.parts[1].data, 1000);
  REQUIRE(scene.wake(false).ok());
  scene.parts[1].data[1000] ^= 0x10;
  scene.expect_bytes();
  // The digests know better: the next sleep copies the piece again.
  REQUIRE(scene.sleep(true).ok());
  CHECK_EQ(scene.slept.copied_bytes, kChunk);
  REQUIRE(scene.wake().ok());
  scene.expect_bytes();
  scene.expect_end();
}

// The device holds what the digest says, so the piece is not copied: the host is not looked at.
TEST(a_kept_backup_that_is_damaged_is_caught_at_sleep_and_nothing_is_unmapped) {
  Scene scene;
  REQUIRE(scene.sleep().ok() && scene.wake().ok());
  damage(scene.parts[0].data, kChunk + 500);
  const Status status = scene.sleep();
  CHECK(status.fault == Fault::integrity);
  CHECK_EQ(status.address, scene.parts[0].at + kChunk);
  CHECK(scene.awake());
  scene.expect_bytes();
  REQUIRE(scene.sleep().ok());  // copies everything
  CHECK_EQ(scene.slept.copied_bytes, 3 * kChunk + kMiB);
  REQUIRE(scene.wake().ok());
  scene.expect_bytes();
  scene.expect_end();
}

TEST(a_wrong_declaration_is_caught_at_sleep) {
  Scene scene;
  REQUIRE(scene.sleep().ok() && scene.wake().ok());
  scene.parts[1].change(scene.r, 3);
  rig::SleepRequest request;
  for (const Part& part : scene.parts) {
    SegmentPlan plan = part.plan();
    plan.unchanged = plan.backup;
    request.segments.push_back(plan);
  }
  request.clean_check = CleanCheck::declared;
  request.verify = true;
  CHECK(scene.r.allocator->sleep(request, scene.slept).fault == Fault::integrity);
  CHECK(scene.awake());
  scene.expect_bytes();
  scene.expect_end();
}

TEST(ranges_at_odd_addresses_are_verified_by_reading) {
  rig::DigestRig r;
  rig::Warm segment(2 * kChunk, {{3, 1000}, {kChunk - 5, 777}}, r);
  rig::SleepRequest request;
  request.segments = {segment.plan()};
  request.verify = true;
  rig::SleepResult slept;
  REQUIRE(r.allocator->sleep(request, slept).ok());
  damage(segment.data, kChunk + 100);
  rig::WakeRequest wake;
  wake.segments = {segment.at};
  wake.verify = true;
  rig::WakeResult woken;
  const Status status = r.allocator->wake(wake, woken);
  CHECK(status.fault == Fault::integrity);
  CHECK_EQ(status.address, segment.at + kChunk - 5);
  CHECK(r.asleep(segment.at));
}

TEST(every_failure_of_a_verified_sleep_leaves_an_exact_state_and_a_retry_succeeds) {
  for (const bool digests : {true, false}) {
    rig::for_each_failure<Scene>([&] { return std::make_unique<Scene>(digests); },
                                 [](Scene& scene) { (void)scene.sleep(); },
                                 [](Scene& scene, const char* call, long) {
                                   if (!scene.r.allocator->verify().ok())
                                     check::expect(false, __FILE__, __LINE__, call);
                                   REQUIRE(scene.sleep().ok());
                                   REQUIRE(scene.wake().ok());
                                   scene.expect_bytes();
                                   scene.expect_end();
                                 });
  }
}

TEST(every_failure_of_a_verified_wake_leaves_everything_asleep_and_a_retry_succeeds) {
  for (const bool digests : {true, false}) {
    rig::for_each_failure<Scene>(
        [&] {
          auto scene = std::make_unique<Scene>(digests);
          REQUIRE(scene->sleep().ok());
          return scene;
        },
        [](Scene& scene) { (void)scene.wake(); },
        [](Scene& scene, const char* call, long) {
          if (!scene.r.allocator->verify().ok()) check::expect(false, __FILE__, __LINE__, call);
          CHECK(scene.asleep() || scene.awake());
          CHECK_EQ(scene.r.computer.ledger().dead_contexts, std::uint64_t{0});
          REQUIRE(scene.wake().ok());
          scene.expect_bytes();
          scene.expect_end();
        });
  }
}

}  // namespace
