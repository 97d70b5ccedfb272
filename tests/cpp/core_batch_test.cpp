// Do many small copies go in few calls, and is nothing lost where such a call fails?
#include <optional>

#include "core/driver.h"
#include "failures.h"
#include "models.h"

#if CUMEM_HAS_BATCHES

namespace {

using cumem::Status;
using rig::calls_of;
using rig::change_places;
using rig::Model;
using rig::Rig;
using rig::WakeResult;

constexpr std::size_t kMany = 8;

// Those that a batch's own failures and company depend on; others have tests of their own.
const std::vector<const char*> kCalls = {"cuMemcpyBatchAsync", "cuEventRecord", "cuMemCreate",
                                         "cuMemMap", "cuStreamSynchronize"};

std::vector<std::size_t> many(std::size_t bytes = kChunk) {
  return std::vector<std::size_t>(kMany, bytes);
}

// `first` is awake; `second` sleeps where there is one.
struct Scene {
  explicit Scene(bool two) : r(2 * kMany * kChunk) {
    if (two) {
      second.emplace(r, many(), 60);
      REQUIRE(second->sleep().ok());
    }
    first.emplace(r, many(), 1);
  }
  void expect_exact(const char* call) {
    if (!r.allocator->verify().ok()) check::expect(false, __FILE__, __LINE__, call);
    first->expect_bytes();
    if (second) second->expect_bytes();
  }
  void expect_end() {
    first->free();
    if (second) second->free();
    r.expect_empty();
  }

  Rig r;
  std::optional<Model> first, second;
};

TEST(small_copies_go_to_the_driver_in_one_call_and_a_few_one_by_one) {
  Scene scene(false);
  const auto made = [&](const char* call) { return calls_of(scene.r, call); };
  REQUIRE(scene.first->sleep().ok());
  CHECK_EQ(made("cuMemcpyBatchAsync"), 1L);
  CHECK_EQ(made("cuMemcpyDtoHAsync"), 0L);
  REQUIRE(scene.first->wake().ok());
  CHECK_EQ(made("cuMemcpyBatchAsync"), 2L);
  CHECK_EQ(made("cuMemcpyHtoDAsync"), 0L);
  scene.expect_exact("a wake");
  const std::vector<cumem::SegmentPlan> one = {scene.first->parts[0].plan()};
  REQUIRE(scene.r.sleep(one).ok());
  REQUIRE(scene.r.wake({scene.first->parts[0].at}).ok());
  CHECK_EQ(made("cuMemcpyBatchAsync"), 2L);
  CHECK(made("cuMemcpyDtoHAsync") > 0 && made("cuMemcpyHtoDAsync") > 0);
  scene.expect_exact("a wake of one");
  scene.expect_end();
}

TEST(a_driver_that_takes_no_batches_gets_the_copies_one_by_one) {
  Scene scene(false);
  rig::fail_call(scene.r, "cuMemcpyBatchAsync", 1, CUDA_ERROR_NOT_SUPPORTED);
  REQUIRE(scene.first->sleep().ok());
  CHECK(calls_of(scene.r, "cuMemcpyDtoHAsync") >= static_cast<long>(kMany));
  rig::fail_call(scene.r, "cuMemcpyBatchAsync", 1, CUDA_ERROR_NOT_SUPPORTED);
  REQUIRE(scene.first->wake().ok());
  scene.expect_exact("a wake");
  scene.expect_end();
}

// One allocation a segment, so that the one that fails says which segment came first.
TEST(large_segments_are_filled_before_small_ones) {
  rig::Config config = rig::small_chunks();
  config.chunk_bytes = 8 * kChunk;
  Rig r(64 * kMiB, config);
  const Model model(r, {kChunk, 3 * kChunk, 2 * kChunk}, 1);
  REQUIRE(model.sleep().ok());
  const std::size_t in_order[] = {3 * kChunk, 2 * kChunk, kChunk};
  for (long nth = 1; nth <= 3; ++nth) {
    rig::fail_call(r, "cuMemCreate", nth);
    cumem::WakeRequest request;
    request.segments = model.addresses();
    WakeResult result;
    CHECK_EQ(r.allocator->wake(request, result).bytes, in_order[nth - 1]);
    CHECK(model.asleep());
  }
  REQUIRE(model.wake().ok());
  model.expect_bytes();
  model.free();
  r.expect_empty();
}

TEST(every_failure_of_a_sleep_and_a_wake_of_many_leaves_an_exact_state) {
  rig::for_each_failure<Scene>([] { return std::make_unique<Scene>(false); },
                               [](Scene& scene) {
                                 (void)scene.first->sleep();
                                 (void)scene.first->wake();
                               },
                               [](Scene& scene, const char* call, long) {
                                 scene.expect_exact(call);
                                 REQUIRE(scene.first->sleep().ok());
                                 CHECK(scene.first->asleep());
                                 REQUIRE(scene.first->wake().ok());
                                 CHECK(scene.first->awake());
                                 scene.expect_exact(call);
                                 scene.expect_end();
                               });
}

TEST(every_failure_of_a_switch_of_many_leaves_an_exact_state) {
  rig::for_each_failure<Scene>(
      kCalls, [] { return std::make_unique<Scene>(true); },
      [](Scene& scene) { (void)change_places(scene.r, *scene.first, *scene.second); },
      [](Scene& scene, const char* call, long) {
        scene.expect_exact(call);
        REQUIRE(change_places(scene.r, *scene.first, *scene.second).ok());
        CHECK(scene.first->asleep() && scene.second->awake());
        scene.expect_exact(call);
        scene.expect_end();
      });
}

}  // namespace

#endif
