// Does every failure during a switch leave an exact state that goes on either way?
#include "failures.h"
#include "models.h"

namespace {

using cumem::Fault;
using cumem::Status;
using rig::change_places;
using rig::Model;
using rig::Rig;

// `in` sleeps, `out` is awake, and the device has room for one and a chunk.
struct Scene {
  explicit Scene(bool digests, rig::Config config = rig::small_chunks()) : r(5 * kChunk, config) {
    if (digests) r.load_digester();
    in.emplace(r, std::vector<std::size_t>{2 * kChunk, 2 * kChunk}, 1);
    REQUIRE(in->sleep().ok());
    out.emplace(r, std::vector<std::size_t>{2 * kChunk, 2 * kChunk}, 5);
  }
  Status go() { return change_places(r, *out, *in); }
  Status go_back() { return change_places(r, *in, *out); }
  void expect_exact(const char* call) {
    if (!r.allocator->verify().ok()) check::expect(false, __FILE__, __LINE__, call);
    CHECK_EQ(r.computer.ledger().dead_contexts, std::uint64_t{0});
    in->expect_bytes();
    out->expect_bytes();
  }
  void expect_end() {
    in->free();
    out->free();
    CHECK_EQ(r.allocator->live_segments(), std::size_t{0});
    r.expect_empty();
  }

  Rig r;
  std::optional<Model> in;
  std::optional<Model> out;
};

void for_each_failure_of_a_switch(bool digests, const std::function<void(Scene&)>& prepare,
                                  const std::function<void(Scene&)>& after) {
  rig::for_each_failure<Scene>(
      [&] {
        auto scene = std::make_unique<Scene>(digests);
        prepare(*scene);
        return scene;
      },
      [](Scene& scene) { (void)scene.go(); },
      [&](Scene& scene, const char* call, long) {
        scene.expect_exact(call);
        after(scene);
        scene.expect_exact(call);
        scene.expect_end();
      });
}

void switch_again(Scene& scene) {
  REQUIRE(scene.go().ok());
  CHECK(scene.in->awake() && scene.out->asleep());
  scene.expect_exact("the same switch");
  REQUIRE(scene.go_back().ok());
  CHECK(scene.in->asleep() && scene.out->awake());
}

void switch_back(Scene& scene) {
  REQUIRE(scene.go_back().ok());
  CHECK(scene.in->asleep() && scene.out->awake());
  scene.expect_exact("the opposite switch");
  REQUIRE(scene.go().ok());
  CHECK(scene.in->awake() && scene.out->asleep());
}

// Both have backups of an earlier cycle, and one piece of `out` has changed.
void warm_up(Scene& scene) {
  REQUIRE(scene.go().ok() && scene.go_back().ok());
  scene.out->parts[1].change(scene.r, kChunk + 9);
}

TEST(every_failure_in_a_switch_leaves_an_exact_state_and_the_same_switch_goes_on) {
  for (const bool digests : {true, false})
    for_each_failure_of_a_switch(digests, [](Scene&) {}, switch_again);
}

TEST(every_failure_in_a_switch_leaves_an_exact_state_and_the_opposite_switch_goes_on) {
  for (const bool digests : {true, false})
    for_each_failure_of_a_switch(digests, [](Scene&) {}, switch_back);
}

TEST(every_failure_in_a_switch_of_kept_backups_goes_on_either_way) {
  for_each_failure_of_a_switch(true, warm_up, switch_again);
  for_each_failure_of_a_switch(true, warm_up, switch_back);
}

TEST(after_a_failed_switch_a_plain_wake_finds_every_byte) {
  for_each_failure_of_a_switch(true, warm_up, [](Scene& scene) {
    REQUIRE(scene.out->sleep().ok() && scene.in->sleep().ok());
    REQUIRE(scene.out->wake().ok());
    scene.out->expect_bytes();
    REQUIRE(scene.out->sleep().ok() && scene.in->wake().ok());
  });
}

// What an earlier failure left mapped has no contents: it must not pass for awake.
TEST(a_sleeping_segment_that_is_still_mapped_is_not_taken_for_awake) {
  Scene scene(false);
  REQUIRE(scene.out->sleep().ok());
  rig::fail_call(scene.r, "cuMemcpyHtoDAsync");
  rig::fail_call(scene.r, "cuMemUnmap");
  CHECK(!scene.r.wake({scene.in->parts[0].at}).ok());
  REQUIRE(scene.r.info(scene.in->parts[0].at).mapped_bytes == 2 * kChunk);
  REQUIRE(scene.r.wake({scene.out->parts[0].at}).ok());
  rig::fail_call(scene.r, "cuMemGetInfo");  // before anything was filled
  CHECK(!scene.go().ok());
  CHECK(scene.in->asleep());
  scene.expect_exact("cuMemGetInfo");
  switch_again(scene);
  scene.expect_end();
}

void refuse_pinning(Rig& r, int refuse) {
  REQUIRE(r.computer.cu.cumem_emulator_set_host_refusal(r.computer.machine, refuse) == 0);
}

TEST(pageable_memory_serves_a_switch_when_pinning_is_refused) {
  Scene scene(false);
  refuse_pinning(scene.r, 1);
  rig::SwitchResult result;
  REQUIRE(change_places(scene.r, *scene.out, *scene.in, &result).ok());
  CHECK(result.sleep.pageable_bytes > 0);
  REQUIRE(scene.go_back().ok());
  scene.expect_exact("cuMemHostRegister");
  refuse_pinning(scene.r, 0);
  scene.expect_end();
}

// Pinning may be refused for the last piece only: it must still come before the first unmap.
TEST(pinning_that_is_refused_and_required_changes_nothing) {
  rig::Config config = rig::small_chunks();
  config.host.allow_pageable = false;
  for (const long nth : {1, 2}) {
    Scene scene(false, config);
    const std::size_t held = scene.r.allocator->host().usage().held_bytes;
    rig::fail_call(scene.r, "cuMemHostRegister", nth, CUDA_ERROR_OUT_OF_MEMORY);
    CHECK(scene.go().fault == Fault::host_memory);
    CHECK(scene.in->asleep() && scene.out->awake());
    scene.expect_exact("cuMemHostRegister");
    CHECK(scene.r.allocator->host().usage().held_bytes <= held + config.host.piece_bytes);
    switch_again(scene);
    scene.expect_end();
  }
}

TEST(a_switch_without_host_memory_changes_nothing) {
  rig::Config config = rig::small_chunks();
  config.host.limit_bytes = 6 * kChunk;  // for one model and a half
  Scene scene(false, config);
  const Status status = scene.go();
  CHECK(status.fault == Fault::host_memory);
  CHECK(scene.in->asleep() && scene.out->awake());
  scene.expect_exact("host memory");
  config.host.limit_bytes = 8 * kChunk;
  scene.r.allocator->configure(config);
  switch_again(scene);
  scene.expect_end();
}

TEST(a_switch_keeps_no_host_memory_where_that_is_not_wanted) {
  rig::Config config = rig::small_chunks();
  config.host.retain = false;
  config.host.piece_bytes = kChunk;
  Scene scene(false, config);
  REQUIRE(scene.go().ok());
  CHECK_EQ(scene.r.allocator->host().usage().held_bytes, scene.out->bytes());
  REQUIRE(scene.go_back().ok());
  CHECK_EQ(scene.r.allocator->host().usage().held_bytes, scene.in->bytes());
  scene.expect_exact("retain");
  scene.expect_end();
}

TEST(a_dead_context_ends_a_switch_and_wakes_nothing) {
  Scene scene(false);
  scene.r.computer.cu.cumem_emulator_poison(scene.r.computer.machine, 0, 700);
  CHECK(scene.go().fault == Fault::dead_context);
  CHECK(scene.in->asleep() && scene.out->awake());
  scene.r.computer.cu.cumem_emulator_poison(scene.r.computer.machine, 0, 0);
}

}  // namespace
