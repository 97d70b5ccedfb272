// Does what the driver refused to take back go when it is asked again, and harm nobody until
// then?
#include <functional>
#include <utility>

#include "failures.h"
#include "models.h"

namespace {

using rig::Rig;
using rig::Status;

constexpr std::size_t kBytes = 2 * kChunk;

// One segment that is used, and one whose free the driver refused.
struct Scene {
  Rig r;
  CUdeviceptr used = 0;
  CUdeviceptr refused = 0;
  const std::vector<unsigned char>& data = Rig::pattern(kBytes, 3);

  explicit Scene(const char* call = "cuMemUnmap") {
    used = r.make(kBytes);
    refused = r.make(kBytes);
    r.write(used, data);
    rig::fail_call(r, call);
    r.allocator->free(refused);
    expect_kept(1);
    CHECK_EQ(r.allocator->counters().refused, std::uint64_t{1});
  }
  void expect_kept(std::uint64_t segments) {
    const cumem::FreeCounters counters = r.allocator->counters();
    CHECK_EQ(counters.quarantined, segments);
    CHECK_EQ(counters.quarantined_bytes, segments * kBytes);
    CHECK(r.allocator->verify().ok());
  }
  Status sleep() { return r.sleep({Rig::whole(used, kBytes)}); }
  Status wake() { return r.wake({used}); }
  void expect_clean_end() {
    expect_kept(0);
    CHECK(r.read(used, kBytes) == data);
    r.allocator->free(used);
    CHECK_EQ(r.allocator->live_segments(), std::size_t{0});
    CHECK_EQ(r.driver->ledger().refused.load(), std::uint64_t{0});
    r.expect_empty();
  }
};

TEST(whatever_call_was_refused_is_made_again_and_no_other_twice) {
  for (const char* call : {"cuMemUnmap", "cuMemRelease", "cuMemAddressFree", "cuCtxSynchronize"}) {
    Scene scene(call);
    scene.r.allocator->catch_up();
    scene.expect_clean_end();
  }
}

TEST(what_is_refused_again_waits_on_and_is_counted_once) {
  Scene scene;
  rig::fail_call(scene.r, "cuMemUnmap");
  scene.r.allocator->catch_up();
  scene.expect_kept(1);
  CHECK_EQ(scene.r.allocator->counters().refused, std::uint64_t{1});
  scene.r.allocator->catch_up();
  scene.expect_clean_end();
}

// Whoever needs memory gets what waited, before it finds that there is none.
TEST(every_operation_begins_with_what_was_refused) {
  const std::vector<std::function<Status(Scene&)>> operations{
      [](Scene& scene) { return scene.sleep(); },
      [](Scene& scene) { return scene.r.allocator->resize({{{scene.used, kBytes}}}); },
      [](Scene& scene) {
        rig::SwitchResult result;
        return scene.r.allocator->exchange(rig::switch_of({Rig::whole(scene.used, kBytes)}, {}),
                                           result);
      },
      [](Scene& scene) { return scene.wake(); },
  };
  for (const auto& operation : operations) {
    Scene scene;
    REQUIRE(operation(scene).ok());
    scene.expect_kept(0);
    REQUIRE(scene.wake().ok());
    scene.expect_clean_end();
  }
}

TEST(a_wake_finds_the_memory_that_was_refused_before) {
  Rig r(2 * kBytes);
  const auto& data = Rig::pattern(kBytes, 4);
  const CUdeviceptr sleeper = r.make(kBytes);
  r.write(sleeper, data);
  REQUIRE(r.sleep({Rig::whole(sleeper, kBytes)}).ok());
  const CUdeviceptr full = r.make(2 * kBytes);
  rig::fail_call(r, "cuMemUnmap");
  r.allocator->free(full);
  REQUIRE(r.wake({sleeper}).ok());
  CHECK(r.read(sleeper, kBytes) == data);
  r.allocator->free(sleeper);
  r.expect_empty();
}

TEST(a_segment_that_was_refused_asleep_goes_too) {
  Scene scene;
  const CUdeviceptr sleeper = scene.r.make(kBytes);
  REQUIRE(scene.r.sleep({Rig::whole(sleeper, kBytes)}).ok());
  scene.expect_kept(0);
  rig::fail_call(scene.r, "cuMemAddressFree");
  scene.r.allocator->free(sleeper);
  scene.expect_kept(1);
  CHECK_EQ(scene.r.allocator->host().usage().used_bytes, std::size_t{0});
  scene.r.allocator->catch_up();
  scene.expect_clean_end();
}

TEST(nothing_is_waited_for_during_a_capture) {
  Scene scene;
  void* stream = scene.r.computer.cu.cumem_emulator_stream_create(scene.r.computer.machine, 0, 0);
  REQUIRE(scene.r.computer.cu.cumem_emulator_begin_capture(stream) == 0);
  scene.r.allocator->catch_up();
  scene.expect_kept(1);
  CHECK_EQ(scene.r.computer.cu.cumem_emulator_end_capture(stream), 0);
  scene.r.allocator->catch_up();
  scene.r.computer.cu.cumem_emulator_stream_destroy(stream);
  scene.expect_clean_end();
}

TEST(work_that_still_writes_is_waited_for) {
  Scene scene;
  void* stream = scene.r.computer.cu.cumem_emulator_stream_create(scene.r.computer.machine, 0, 1);
  scene.r.computer.cu.cumem_emulator_enqueue_write(scene.r.computer.machine, stream, scene.refused,
                                                   scene.data.data(), kBytes, 30000);
  scene.r.allocator->catch_up();
  CHECK_EQ(scene.r.computer.ledger().pending_work, std::uint64_t{0});
  scene.r.computer.cu.cumem_emulator_stream_destroy(stream);
  scene.expect_clean_end();
}

TEST(a_dead_context_keeps_what_was_refused) {
  Scene scene;
  const auto poison = [&scene](CUresult code) {
    scene.r.computer.cu.cumem_emulator_poison(scene.r.computer.machine, 0, code);
  };
  poison(CUDA_ERROR_ILLEGAL_ADDRESS);
  scene.r.allocator->catch_up();
  CHECK_EQ(scene.r.allocator->counters().quarantined, std::uint64_t{1});
  poison(CUDA_SUCCESS);
  scene.r.allocator->catch_up();
  scene.expect_clean_end();
}

}  // namespace
