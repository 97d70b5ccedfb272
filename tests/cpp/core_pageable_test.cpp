// Do copies of backups in pageable memory go through pinned slots, byte for byte, and leave an
// exact state whatever fails?
#include "failures.h"
#include "models.h"

namespace {

using cumem::CleanCheck;
using cumem::Status;
using rig::change_places;
using rig::Config;
using rig::Model;
using rig::Part;
using rig::Rig;

constexpr std::size_t kSlot = kMiB / 2;

// Slots smaller than pieces, and pieces that ranges straddle.
Config pageable(unsigned threads = 1) {
  Config config = rig::small_chunks();
  config.host.pin_backups = false;
  config.file.threads = threads;  // 1: calls come in one order
  config.file.buffer_bytes = kSlot;
  config.file.ring_bytes = 4 * kSlot;
  return config;
}

void refuse_pinning(Rig& r, int refuse) {
  REQUIRE(r.computer.cu.cumem_emulator_set_host_refusal(r.computer.machine, refuse) == 0);
}

// Ranges of all sizes, none of which starts or ends where a piece or a slot does.
std::vector<cumem::Range> odd_ranges(CUdeviceptr at) {
  return {{at, 1},
          {at + 4096, 3 * kMiB + 12345},
          {at + 4 * kMiB, 2 * kMiB - 7},
          {at + 7 * kMiB + 1, 333}};
}

TEST(every_range_comes_back_through_the_slots) {
  for (const unsigned threads : {1U, 3U}) {
    Rig r(64 * kMiB, pageable(threads));
    const Part part(r, 8 * kMiB, 3);
    const auto ranges = odd_ranges(part.at);
    REQUIRE(r.sleep({{part.at, ranges}}).ok());
    CHECK_EQ(r.slept.copied_bytes, cumem::total_bytes(ranges));
    REQUIRE(r.wake({part.at}).ok());
    CHECK_EQ(r.woken.restored_bytes, cumem::total_bytes(ranges));
    for (const cumem::Range& range : ranges) {
      const auto first = part.data.begin() + static_cast<std::ptrdiff_t>(range.address - part.at);
      CHECK(r.read(range.address, range.bytes) ==
            std::vector<unsigned char>(first, first + static_cast<std::ptrdiff_t>(range.bytes)));
    }
    r.allocator->free(part.at);
    r.expect_empty();
  }
}

TEST(only_the_slots_are_pinned_and_no_more_than_the_ring) {
  Rig r(64 * kMiB, pageable(3));
  const Part part(r, 8 * kMiB, 4);
  for (int cycle = 0; cycle < 3; ++cycle) {
    REQUIRE(r.sleep({part.plan()}, CleanCheck::never).ok());
    CHECK_EQ(r.slept.pageable_bytes, 8 * kMiB);
    CHECK_EQ(r.allocator->host().usage().held_bytes, 8 * kMiB + 4 * kSlot);
    CHECK_EQ(r.computer.ledger().host_registrations - r.start.host_registrations, std::uint64_t{4});
    REQUIRE(r.wake({part.at}).ok());
    CHECK(part.intact(r));
  }
  CHECK_EQ(rig::calls_of(r, "cuMemcpyDtoHAsync"), 3 * static_cast<long>(8 * kMiB / kSlot));
  CHECK_EQ(r.allocator->file_bytes(), std::uint64_t{0});
}

TEST(a_backup_that_was_refused_goes_through_slots_that_were_not) {
  Config config = pageable();
  config.host.pin_backups = true;
  Rig r(64 * kMiB, config);
  const Part part(r, 3 * kMiB, 5);
  rig::fail_call(r, "cuMemHostRegister", 1, CUDA_ERROR_OUT_OF_MEMORY);
  REQUIRE(r.sleep({part.plan()}).ok());
  CHECK_EQ(r.slept.pageable_bytes, 3 * kMiB);
  CHECK_EQ(r.computer.ledger().host_registrations - r.start.host_registrations, std::uint64_t{4});
  REQUIRE(r.wake({part.at}).ok());
  CHECK(part.intact(r));
}

TEST(without_a_single_slot_the_driver_copies_and_nothing_piles_up) {
  Rig r(64 * kMiB, pageable(2));
  refuse_pinning(r, 1);
  const Part part(r, 5 * kMiB, 6);
  rig::SegmentPlan plan{part.at};
  for (std::size_t i = 0; i < 10; ++i) plan.backup.push_back({part.at + i * kSlot, kSlot});
  for (int cycle = 0; cycle < 3; ++cycle) {
    REQUIRE(r.sleep({plan}, CleanCheck::never).ok());
    CHECK_EQ(r.allocator->host().usage().held_bytes, 5 * kMiB);
    REQUIRE(r.wake({part.at}).ok());
    CHECK(part.intact(r));
  }
  CHECK_EQ(rig::calls_of(r, "cuMemcpyBatchAsync"), 0L);  // is for memory that is pinned
}

TEST(fewer_slots_will_do_where_the_driver_pins_no_more) {
  Rig r(64 * kMiB, pageable(3));
  const Part part(r, 5 * kMiB, 7);
  REQUIRE(r.computer.cu.cumem_emulator_set_host_limit(r.computer.machine, 2 * kSlot) == 0);
  for (int cycle = 0; cycle < 2; ++cycle) {
    REQUIRE(r.sleep({part.plan()}, CleanCheck::never).ok());
    CHECK_EQ(r.allocator->host().usage().held_bytes, 5 * kMiB + 2 * kSlot);
    REQUIRE(r.wake({part.at}).ok());
    CHECK(part.intact(r));
  }
}

TEST(only_what_changed_is_copied) {
  Rig r(64 * kMiB, pageable());
  r.load_digester();
  Part part(r, 4 * kChunk, 8);
  REQUIRE(r.sleep({part.plan()}).ok() && r.wake({part.at}).ok());
  part.change(r, kChunk + 5);
  part.change(r, 3 * kChunk + 5);
  REQUIRE(r.sleep({part.plan()}).ok());
  CHECK_EQ(r.slept.copied_bytes, 2 * kChunk);
  REQUIRE(r.wake({part.at}).ok());
  CHECK(part.intact(r));
}

// Within a limit a backup takes what idle slots hold.
TEST(slots_make_room_for_backups) {
  Config config = pageable();
  config.host.limit_bytes = 5 * kMiB;
  Rig r(64 * kMiB, config);
  const Part first(r, kChunk, 9);
  const Part second(r, 2 * kChunk, 10);
  REQUIRE(r.sleep({first.plan()}).ok());
  CHECK_EQ(r.allocator->host().usage().held_bytes, kChunk + 4 * kSlot);
  CHECK(r.sleep({second.plan()}).fault == cumem::Fault::host_memory);
  config.host.limit_bytes = 6 * kMiB;
  r.allocator->configure(config);
  REQUIRE(r.sleep({second.plan()}).ok());
  CHECK_EQ(r.allocator->host().usage().held_bytes, 3 * kChunk);
  REQUIRE(r.wake({first.at, second.at}).ok());
  CHECK(first.intact(r) && second.intact(r));
}

TEST(pinning_can_be_switched_off_and_on) {
  Config config = pageable();
  config.host.pin_backups = true;
  Rig r(64 * kMiB, config);
  const Part part(r, kChunk, 11);
  for (const bool pin : {true, false, true}) {
    config.host.pin_backups = pin;
    r.allocator->configure(config);
    r.allocator->release_host();
    REQUIRE(r.sleep({part.plan()}).ok());
    CHECK_EQ(r.slept.pageable_bytes, pin ? 0 : kChunk);
    REQUIRE(r.wake({part.at}).ok());
    CHECK(part.intact(r));
  }
}

struct Scene {
  Scene() : r(64 * kMiB, pageable()), parts(r, {kChunk, 2 * kChunk}, 1) { r.load_digester(); }
  void expect_exact(const char* call) {
    if (!r.allocator->verify().ok()) check::expect(false, __FILE__, __LINE__, call);
    parts.expect_bytes();
  }
  void expect_end() {
    parts.free();
    CHECK_EQ(r.allocator->host().usage().used_bytes, std::size_t{0});
    r.expect_empty();
  }
  Rig r;
  Model parts;
};

std::unique_ptr<Scene> asleep() {
  auto scene = std::make_unique<Scene>();
  REQUIRE(scene->parts.sleep().ok());
  return scene;
}

// One piece of what the backups hold has changed.
std::unique_ptr<Scene> warm() {
  auto scene = asleep();
  REQUIRE(scene->parts.wake().ok());
  scene->parts.parts[1].change(scene->r, kChunk + 9);
  return scene;
}

TEST(every_failure_in_a_pageable_sleep_leaves_an_exact_state_and_a_retry_succeeds) {
  for (const auto& make : {+[] { return std::make_unique<Scene>(); }, +[] { return warm(); }})
    rig::for_each_failure<Scene>(
        make, [](Scene& scene) { (void)scene.parts.sleep(); },
        [](Scene& scene, const char* call, long) {
          scene.expect_exact(call);
          REQUIRE(scene.parts.sleep().ok());
          CHECK(scene.parts.asleep());
          REQUIRE(scene.parts.wake().ok());
          scene.expect_exact(call);
          scene.expect_end();
        });
}

TEST(every_failure_in_a_pageable_wake_leaves_all_asleep_or_awake_and_a_retry_succeeds) {
  rig::for_each_failure<Scene>(
      asleep, [](Scene& scene) { (void)scene.parts.wake(); },
      [](Scene& scene, const char* call, long) {
        CHECK(scene.parts.asleep() || scene.parts.awake());
        REQUIRE(scene.parts.wake().ok());
        scene.expect_exact(call);
        scene.expect_end();
      });
}

TEST(a_copy_that_fails_on_several_threads_changes_nothing) {
  for (const long nth : {1, 5, 9}) {
    Rig r(64 * kMiB, pageable(3));
    const Part part(r, 4 * kChunk, 12);
    rig::fail_call(r, "cuMemcpyDtoHAsync", nth);
    CHECK(!r.sleep({part.plan()}).ok());
    CHECK(!r.asleep(part.at) && part.intact(r));
    REQUIRE(r.sleep({part.plan()}).ok());
    rig::fail_call(r, "cuMemcpyHtoDAsync", nth);
    CHECK(!r.wake({part.at}).ok());
    CHECK(r.asleep(part.at));
    REQUIRE(r.wake({part.at}).ok());
    CHECK(part.intact(r));
  }
}

TEST(pageable_backups_serve_a_switch) {
  Rig r(5 * kChunk, pageable(2));
  const Model in(r, {2 * kChunk, 2 * kChunk}, 1);
  REQUIRE(in.sleep().ok());
  const Model out(r, {2 * kChunk, 2 * kChunk}, 5);
  rig::SwitchResult result;
  REQUIRE(change_places(r, out, in, &result).ok());
  CHECK_EQ(result.sleep.pageable_bytes, 8 * kChunk);
  in.expect_bytes();
  REQUIRE(change_places(r, in, out).ok());
  CHECK(in.asleep() && out.awake());
  out.expect_bytes();
}

TEST(pageable_backups_serve_a_piecewise_wake) {
  Rig r(64 * kMiB, pageable(2));
  const Model parts(r, {kChunk, 3 * kChunk}, 2);
  REQUIRE(parts.sleep().ok());
  cumem::WakeRequest request;
  request.segments = parts.addresses();
  request.progress = std::make_shared<cumem::WakeProgress>();
  for (const Part& part : parts.parts) request.progress->expect({part.at, part.data.size()});
  REQUIRE(r.allocator->wake(request, r.woken).ok());
  CHECK(parts.awake());
  parts.expect_bytes();
}

}  // namespace
