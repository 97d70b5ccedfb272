// Does every failure of every driver call leave an exact state?
//
// For each call that an operation makes, and each time it makes it, that one call
// fails once. Then: the state is one that the contract allows, nothing is leaked,
// every byte is in place or in a backup, and a plain retry succeeds.
#include <functional>

#include "core_rig.h"
#include "failures.h"

namespace {

using cumem::Status;
using rig::Rig;

constexpr std::size_t kBytes = 2 * kChunk;

enum class Digests { with, without };

// Made once for each seed: the loops below set hundreds of scenes.
std::vector<unsigned char> bytes_of(unsigned seed) {
  static const std::vector<unsigned char> made[] = {Rig::pattern(kBytes, 1),
                                                    Rig::pattern(kBytes, 2)};
  return made[seed - 1];
}

struct Scene {
  Rig r;
  CUdeviceptr a = 0;
  CUdeviceptr b = 0;
  std::vector<unsigned char> data_a = bytes_of(1);
  std::vector<unsigned char> data_b = bytes_of(2);

  explicit Scene(Digests digests = Digests::without) {
    if (digests == Digests::with) r.load_digester();
    a = r.make(kBytes);
    b = r.make(kBytes);
    r.write(a, data_a);
    r.write(b, data_b);
  }
  Status sleep() { return r.sleep({Rig::whole(a, kBytes), Rig::whole(b, kBytes)}); }
  Status wake() { return r.wake({a, b}, 0xFF); }
  // A cycle, and then a write to one piece.
  void warm_up() {
    REQUIRE(sleep().ok() && wake().ok());
    data_b[kChunk + 3] ^= 1;
    r.write(b + kChunk + 3, {data_b[kChunk + 3]});
  }
  void expect_bytes() {
    CHECK(r.read(a, kBytes) == data_a);
    CHECK(r.read(b, kBytes) == data_b);
  }
  // What the driver refused it takes when it is asked again.
  void expect_all_back() {
    r.allocator->catch_up();
    CHECK_EQ(r.allocator->counters().quarantined, std::uint64_t{0});
    CHECK_EQ(r.allocator->counters().quarantined_bytes, std::uint64_t{0});
    CHECK(r.allocator->verify().ok());
  }
  void expect_clean_end() {
    r.allocator->free(a);
    r.allocator->free(b);
    CHECK_EQ(r.allocator->live_segments(), std::size_t{0});
    r.expect_empty();
  }
};

using Step = std::function<void(Scene&)>;
using After = std::function<void(Scene&, const char* call)>;

// Of every call that `operation` makes after `prepare`.
void for_every_failure(Digests digests, const Step& prepare, const Step& operation,
                       const After& after) {
  rig::for_each_failure<Scene>(
      [&] {
        auto scene = std::make_unique<Scene>(digests);
        prepare(*scene);
        return scene;
      },
      operation, [&](Scene& scene, const char* call, long) { after(scene, call); });
}

void expect_a_good_retry(Scene& scene, const char* call) {
  const Status status = scene.r.allocator->verify();
  if (!status.ok()) check::expect(false, __FILE__, __LINE__, call);
  REQUIRE(scene.sleep().ok());
  CHECK(scene.r.asleep(scene.a) && scene.r.asleep(scene.b));
  CHECK(scene.r.allocator->verify().ok());
  CHECK_EQ(scene.r.computer.ledger().handles, std::uint64_t{0});
  REQUIRE(scene.wake().ok());
  scene.expect_bytes();
  CHECK(scene.r.allocator->verify().ok());
  scene.expect_clean_end();
}

TEST(every_failure_in_sleep_leaves_an_exact_state_and_a_retry_succeeds) {
  for (const Digests digests : {Digests::with, Digests::without}) {
    for_every_failure(
        digests, [](Scene&) {}, [](Scene& scene) { (void)scene.sleep(); }, expect_a_good_retry);
  }
}

TEST(every_failure_in_a_sleep_after_a_wake_leaves_an_exact_state_and_a_retry_succeeds) {
  for_every_failure(
      Digests::with, [](Scene& scene) { scene.warm_up(); },
      [](Scene& scene) { (void)scene.sleep(); }, expect_a_good_retry);
}

// With no retry: what is awake has its bytes, what is asleep comes back.
TEST(every_failure_in_a_sleep_after_a_wake_loses_no_byte) {
  for_every_failure(
      Digests::with, [](Scene& scene) { scene.warm_up(); },
      [](Scene& scene) { (void)scene.sleep(); },
      [](Scene& scene, const char*) {
        REQUIRE(scene.wake().ok());
        scene.expect_bytes();
        scene.expect_clean_end();
      });
}

TEST(every_failure_before_the_first_unmap_of_a_sleep_changes_nothing) {
  for (const char* call :
       {"cuMemHostRegister", "cuCtxSynchronize", "cuStreamCreate", "cuMemcpyDtoHAsync",
        "cuEventCreate", "cuEventRecord", "cuEventSynchronize"}) {
    rig::Config config = rig::small_chunks();
    config.host.allow_pageable = false;
    Rig r(64 * kMiB, config);
    const CUdeviceptr a = r.make(kBytes);
    const auto data = Rig::pattern(kBytes, 4);
    r.write(a, data);
    rig::fail_call(r, call);
    CHECK(!r.sleep({Rig::whole(a, kBytes)}).ok());
    CHECK(!r.asleep(a));
    CHECK(r.read(a, kBytes) == data);
    CHECK_EQ(r.allocator->host().usage().used_bytes, std::size_t{0});
    r.allocator->free(a);
    r.expect_empty();
  }
}

TEST(every_failure_in_wake_leaves_everything_asleep_and_a_retry_succeeds) {
  for_every_failure(
      Digests::with, [](Scene& scene) { REQUIRE(scene.sleep().ok()); },
      [](Scene& scene) { (void)scene.wake(); },
      [](Scene& scene, const char*) {
        const bool woke = !scene.r.asleep(scene.a);
        CHECK_EQ(woke, !scene.r.asleep(scene.b));
        CHECK(scene.r.allocator->verify().ok());
        REQUIRE(scene.wake().ok());
        scene.expect_bytes();
        CHECK(scene.r.allocator->verify().ok());
        scene.expect_clean_end();
      });
}

TEST(every_failure_in_malloc_gives_back_what_was_taken) {
  for_every_failure(
      Digests::without, [](Scene&) {},
      [](Scene& scene) {
        CUdeviceptr out = 0;
        const Status status = scene.r.allocator->malloc(3 * kChunk, 0, nullptr,
                                                        {"weights", "offload", 1, false}, out);
        CHECK_EQ(status.ok(), out != 0);
        if (out != 0) scene.r.allocator->free(out);
      },
      [](Scene& scene, const char*) {
        CHECK(scene.r.allocator->verify().ok());
        scene.expect_bytes();
        CUdeviceptr out = 0;
        REQUIRE(scene.r.allocator->malloc(kChunk, 0, nullptr, {"weights", "offload", 1, false}, out)
                    .ok());
        scene.r.allocator->free(out);
        scene.expect_all_back();
        scene.expect_bytes();
        scene.expect_clean_end();
      });
}

// What the driver will not take back is set aside and counted, never reused.
TEST(every_failure_in_free_is_counted_and_harms_nobody) {
  for_every_failure(
      Digests::without, [](Scene&) {}, [](Scene& scene) { scene.r.allocator->free(scene.a); },
      [](Scene& scene, const char*) {
        CHECK(scene.r.allocator->verify().ok());
        const auto counters = scene.r.allocator->counters();
        const auto ledger = scene.r.computer.ledger();
        const std::uint64_t kept = counters.quarantined;
        CHECK(ledger.reservations == 1 + kept || counters.waiting == 1);
        CHECK(scene.r.read(scene.b, kBytes) == scene.data_b);
        scene.r.allocator->drain();
        const CUdeviceptr next = scene.r.make(kBytes);
        CHECK(next != scene.a || kept == 0);
        scene.r.allocator->free(next);
        scene.expect_all_back();
        CHECK(scene.r.read(scene.b, kBytes) == scene.data_b);
        scene.r.allocator->free(scene.b);
        scene.r.expect_empty();
      });
}

TEST(a_refused_unmap_can_be_continued_with_sleep_or_undone_with_wake) {
  for (bool with_wake : {false, true}) {
    Scene scene;
    rig::fail_call(scene.r, "cuMemUnmap", 2);  // all chunks of the second segment
    CHECK(!scene.sleep().ok());
    CHECK(scene.r.asleep(scene.a));
    CHECK(!scene.r.asleep(scene.b));
    CHECK_EQ(scene.r.info(scene.b).mapped_bytes, kBytes);
    if (!with_wake) REQUIRE(scene.sleep().ok());
    REQUIRE(scene.wake().ok());
    scene.expect_bytes();
    scene.expect_clean_end();
  }
}

TEST(a_refused_release_can_be_continued_with_sleep_or_undone_with_wake) {
  for (bool with_wake : {false, true}) {
    Scene scene;
    rig::fail_call(scene.r, "cuMemRelease", 2);  // the second chunk of the first segment
    CHECK(!scene.sleep().ok());
    CHECK(scene.r.asleep(scene.a));
    CHECK_EQ(scene.r.info(scene.a).mapped_bytes, std::size_t{0});
    CHECK_EQ(scene.r.info(scene.a).handles, std::size_t{1});
    CHECK(!scene.r.asleep(scene.b));
    if (!with_wake) REQUIRE(scene.sleep().ok());
    REQUIRE(scene.wake().ok());
    scene.expect_bytes();
    scene.expect_clean_end();
  }
}

TEST(a_refused_first_unmap_leaves_the_segment_awake) {
  Scene scene;
  rig::fail_call(scene.r, "cuMemUnmap");
  CHECK(!scene.sleep().ok());
  CHECK(!scene.r.asleep(scene.a) && !scene.r.asleep(scene.b));
  scene.expect_bytes();
  scene.expect_clean_end();
}

TEST(a_dead_context_is_told_apart_and_free_stays_silent) {
  Scene scene;
  scene.r.computer.cu.cumem_emulator_poison(scene.r.computer.machine, 0,
                                            CUDA_ERROR_ILLEGAL_ADDRESS);
  CHECK(scene.sleep().fault == cumem::Fault::dead_context);
  scene.r.allocator->free(scene.a);
  CUdeviceptr out = 0;
  CHECK(scene.r.allocator->malloc(kChunk, 0, nullptr, {"w", "offload", 1, false}, out).fault ==
        cumem::Fault::dead_context);
  scene.r.computer.cu.cumem_emulator_poison(scene.r.computer.machine, 0, 0);
}

}  // namespace
