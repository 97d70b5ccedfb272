// Does a wake with a WakeProgress bring segments one by one, and tell who waits?
#include <algorithm>
#include <atomic>
#include <chrono>
#include <thread>

#include "failures.h"
#include "models.h"

namespace {

using cumem::Fault;
using cumem::Status;
using cumem::WakeProgress;
using rig::Model;
using rig::Rig;

const std::vector<std::size_t> kFour(4, kChunk);

// Sleeping segments and the wake that is to bring them.
struct Scene {
  explicit Scene(std::vector<std::size_t> sizes = kFour, rig::Config config = rig::small_chunks(),
                 int devices = 1)
      : r(64 * kMiB, config, devices), progress(std::make_shared<WakeProgress>()) {
    for (int device = 0; device < devices; ++device) {
      model.emplace_back(r, sizes, 10U * device, device);
      REQUIRE(model.back().sleep().ok());
      for (const rig::Part& part : model.back().parts) parts.push_back(part);
    }
    for (const rig::Part& part : parts) progress->expect({part.at, part.data.size()});
  }
  // Each segment of a chunk takes so long from now on.
  void slow_down(int milliseconds) {
    r.computer.cu.cumem_emulator_set_bandwidth(r.computer.machine, kChunk * 1000 / milliseconds);
  }
  Status wake() {
    rig::WakeRequest request;
    for (const rig::Part& part : parts) request.segments.push_back(part.at);
    request.progress = progress;
    result = {};
    return r.allocator->wake(request, result);
  }
  Status wait(std::size_t part) { return progress->wait(parts[part].at); }
  bool intact(std::size_t part) { return parts[part].intact(r); }
  bool asleep(std::size_t part) { return r.asleep(parts[part].at); }
  void expect_all() {
    for (std::size_t part = 0; part < parts.size(); ++part) CHECK(!asleep(part) && intact(part));
    CHECK(r.allocator->verify().ok());
  }
  void expect_end() {
    for (const rig::Part& part : parts) r.allocator->free(part.at);
    // What the driver would not unpin stays.
    if (r.driver->ledger().refused == 0) r.expect_empty();
  }

  Rig r;
  std::vector<Model> model;
  std::vector<rig::Part> parts;
  std::shared_ptr<WakeProgress> progress;
  rig::WakeResult result;
};

// The wake, on a thread of its own.
class Waking {
 public:
  explicit Waking(Scene& scene) : thread_([this, &scene] { status_ = scene.wake(); }) {}
  ~Waking() {
    if (thread_.joinable()) thread_.join();
  }
  Status join() {
    thread_.join();
    return status_;
  }

 private:
  Status status_;
  std::thread thread_;
};

template <class Condition>
bool soon(const Condition& condition) {
  for (int i = 0; i < 20000 && !condition(); ++i)
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  return condition();
}

TEST(a_wake_with_progress_brings_everything) {
  Scene scene;
  REQUIRE(scene.wake().ok());
  CHECK_EQ(scene.result.segments.size(), std::size_t{4});
  CHECK_EQ(scene.result.restored_bytes, 4 * kChunk);
  CHECK_EQ(scene.result.mapped_bytes, 4 * kChunk);
  for (std::size_t part = 0; part < 4; ++part) {
    CHECK(scene.progress->reached(scene.parts[part].at));
    CHECK(scene.wait(part).ok());
    CHECK(scene.progress->hold(scene.parts[part].at, nullptr).ok());
  }
  scene.expect_all();
  scene.expect_end();
}

TEST(segments_are_awake_one_by_one_and_in_order) {
  Scene scene;
  std::reverse(scene.parts.begin(), scene.parts.end());
  scene.slow_down(100);
  Waking waking(scene);
  for (std::size_t part = 0; part < 3; ++part) {
    CHECK(soon([&] { return !scene.asleep(part); }));
    CHECK(scene.asleep(3));
    CHECK(!scene.progress->reached(scene.parts[3].at));
  }
  REQUIRE(waking.join().ok());
  scene.expect_all();
  scene.expect_end();
}

TEST(who_waits_before_the_wake_begins_finds_the_bytes) {
  Scene scene;
  std::vector<std::thread> waiters;
  for (std::size_t part = 0; part < 4; ++part) {
    waiters.emplace_back([&, part] {
      CHECK(scene.wait(part).ok());
      CHECK(scene.progress->reached(scene.parts[part].at));
    });
  }
  REQUIRE(scene.wake().ok());
  for (std::thread& waiter : waiters) waiter.join();
  scene.expect_all();
  scene.expect_end();
}

TEST(a_stream_that_is_held_reads_what_was_put_to_sleep) {
  for (const bool before_submission : {true, false}) {
    Scene scene;
    scene.slow_down(30);
    void* stream = scene.r.computer.cu.cumem_emulator_stream_create(scene.r.computer.machine, 0, 1);
    std::vector<unsigned char> seen(kChunk);
    auto use = [&] {
      CHECK(scene.progress->hold(scene.parts[2].at + 99, static_cast<CUstream>(stream)).ok());
      CHECK_EQ(
          scene.r.computer.cu.cumem_emulator_enqueue_read(
              scene.r.computer.machine, stream, scene.parts[2].at, seen.data(), seen.size(), 0),
          0);
    };
    if (before_submission) {
      std::thread user(use);
      std::this_thread::sleep_for(std::chrono::milliseconds(5));
      REQUIRE(scene.wake().ok());
      user.join();
    } else {
      Waking waking(scene);
      CHECK(soon([&] { return !scene.asleep(0); }));
      use();
      REQUIRE(waking.join().ok());
    }
    CHECK_OK(scene.r.computer.cu.cuCtxSynchronize());
    CHECK(seen == scene.parts[2].data);
    scene.r.computer.cu.cumem_emulator_stream_destroy(stream);
    scene.expect_end();
  }
}

TEST(memory_of_others_is_there_at_once) {
  Scene scene;
  const CUdeviceptr other = scene.r.make(kChunk);
  for (const CUdeviceptr at : {other, CUdeviceptr{0}, CUdeviceptr{4096}}) {
    CHECK(scene.progress->wait(at).ok());
    CHECK(scene.progress->hold(at, nullptr).ok());
    CHECK(scene.progress->reached(at));
  }
  CHECK(!scene.progress->reached(scene.parts[0].at));
  REQUIRE(scene.wake().ok());
  scene.r.allocator->free(other);
  scene.expect_end();
}

TEST(what_does_not_come_stays_asleep_and_who_waits_is_told) {
  Scene scene;
  rig::fail_call(scene.r, "cuMemCreate", 3, CUDA_ERROR_OUT_OF_MEMORY);
  std::vector<std::thread> waiters;
  for (std::size_t part = 0; part < 4; ++part) {
    waiters.emplace_back([&, part] {
      const Status status = scene.wait(part);
      CHECK(status.fault == (part < 2 ? Fault::none : Fault::device_memory));
      CHECK(part < 2 || !scene.progress->reached(scene.parts[part].at));
    });
  }
  const Status status = scene.wake();
  CHECK(status.fault == Fault::device_memory);
  CHECK(status.free_bytes > 0);
  for (std::thread& waiter : waiters) waiter.join();
  CHECK(!scene.asleep(0) && !scene.asleep(1) && scene.asleep(2) && scene.asleep(3));
  CHECK(scene.intact(0) && scene.intact(1));
  CHECK_EQ(scene.result.segments.size(), std::size_t{2});
  CHECK(scene.r.allocator->verify().ok());
  REQUIRE(scene.r.wake({scene.parts[2].at, scene.parts[3].at}).ok());
  scene.expect_all();
  scene.expect_end();
}

// The wake's failure is not theirs who wait for what it brought.
TEST(every_failure_is_told_to_those_who_wait_for_what_sleeps) {
  for (const bool retain : {true, false}) {
    rig::Config config = rig::small_chunks();
    config.host.retain = retain;
    rig::for_each_failure<Scene>(
        [&] {
          return std::make_unique<Scene>(std::vector<std::size_t>{kChunk, 2 * kChunk}, config);
        },
        [](Scene& scene) { (void)scene.wake(); },
        [](Scene& scene, const char* call, long) {
          if (!scene.r.allocator->verify().ok()) check::expect(false, __FILE__, __LINE__, call);
          CHECK_EQ(scene.r.computer.ledger().dead_contexts, std::uint64_t{0});
          for (std::size_t part = 0; part < 2; ++part) {
            CHECK_EQ(scene.wait(part).ok(), !scene.asleep(part));
            CHECK(scene.asleep(part) || scene.intact(part));
          }
          REQUIRE(scene.r.wake({scene.parts[0].at, scene.parts[1].at}).ok());
          scene.expect_all();
          scene.expect_end();
        });
  }
}

TEST(a_capture_refuses_it_and_who_waits_is_told) {
  Scene scene;
  void* stream = scene.r.computer.cu.cumem_emulator_stream_create(scene.r.computer.machine, 0, 0);
  REQUIRE(scene.r.computer.cu.cumem_emulator_begin_capture(stream) == 0);
  CHECK(scene.wake().fault == Fault::capture);
  CHECK(scene.wait(3).fault == Fault::capture);
  CHECK(scene.r.computer.cu.cumem_emulator_end_capture(stream) == 0);
  scene.r.computer.cu.cumem_emulator_stream_destroy(stream);
  CHECK(scene.asleep(0) && scene.asleep(3));
  scene.expect_end();
}

TEST(many_threads_wait_hold_and_ask_while_segments_come_and_go) {
  Scene scene(std::vector<std::size_t>(8, kChunk));
  std::atomic<bool> stop{false};
  std::vector<std::thread> threads;
  for (int i = 0; i < 4; ++i) {
    threads.emplace_back([&, i] {
      for (std::size_t part = 0; part < 8; ++part) {
        const CUdeviceptr at = scene.parts[(part + i) % 8].at;
        CHECK(i % 2 == 0 ? scene.progress->wait(at).ok() : scene.progress->hold(at, nullptr).ok());
      }
    });
  }
  threads.emplace_back([&] {
    while (!stop) {
      for (const rig::Part& part : scene.parts) (void)scene.progress->reached(part.at);
      (void)scene.r.allocator->segments();
    }
  });
  threads.emplace_back([&] { scene.r.allocator->free(scene.parts[7].at); });
  REQUIRE(scene.wake().ok());
  stop = true;
  for (std::thread& thread : threads) thread.join();
  scene.parts.pop_back();
  scene.r.allocator->drain();
  scene.expect_all();
  scene.expect_end();
}

TEST(segments_of_several_devices_come_in_the_order_asked_for) {
  Scene scene({kChunk, kChunk}, rig::small_chunks(), 2);
  std::swap(scene.parts[1], scene.parts[2]);
  Waking waking(scene);
  for (std::size_t part = 0; part < 4; ++part) CHECK(scene.wait(part).ok());
  REQUIRE(waking.join().ok());
  scene.expect_all();
  scene.expect_end();
}

TEST(a_progress_may_outlive_its_allocator) {
  for (const bool fails : {false, true}) {
    Scene scene;
    if (fails) rig::fail_call(scene.r, "cuMemMap", 2);
    CHECK_EQ(scene.wake().ok(), !fails);
    scene.r.allocator.reset();
    CHECK_EQ(scene.r.computer.ledger().events, std::uint64_t{0});
    CHECK(scene.progress->wait(scene.parts[0].at).ok());
    CHECK_EQ(scene.progress->wait(scene.parts[3].at).ok(), !fails);
    scene.progress.reset();
    CHECK_EQ(scene.r.driver->ledger().refused.load(), std::uint64_t{0});
  }
}

}  // namespace
