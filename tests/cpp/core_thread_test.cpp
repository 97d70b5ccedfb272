// Do malloc, free, sleep and wake from many threads keep the books right?
#include <atomic>
#include <chrono>
#include <thread>

#include "core_rig.h"

namespace {

using cumem::SegmentPlan;
using rig::Rig;

// Each thread pushes no context: cumem must bring its own.
void churn(Rig& r, unsigned seed, const std::atomic<bool>& stop) {
  while (!stop) {
    CUdeviceptr address = 0;
    const std::size_t bytes = kChunk * (1 + seed++ % 3);
    if (!r.allocator->malloc(bytes, 0, nullptr, {"scratch", "offload", 2, false}, address).ok())
      continue;
    r.allocator->free(address);
  }
}

TEST(allocations_go_on_while_another_tag_sleeps_and_wakes) {
  Rig r(128 * kMiB);
  const std::size_t bytes = 3 * kChunk;
  const CUdeviceptr a = r.make(bytes);
  const auto data = Rig::pattern(bytes, 21);
  r.write(a, data);
  std::atomic<bool> stop{false};
  std::vector<std::thread> threads;
  for (unsigned i = 0; i < 3; ++i) threads.emplace_back([&, i] { churn(r, i, stop); });
  threads.emplace_back([&] {
    while (!stop) {
      (void)r.allocator->segments();
      (void)r.allocator->is_awake(a, bytes);
      (void)r.allocator->counters();
    }
  });
  for (int round = 0; round < 20; ++round) {
    CHECK(r.sleep({Rig::whole(a, bytes)}).ok());
    CHECK(r.wake({a}).ok());
  }
  stop = true;
  for (std::thread& thread : threads) thread.join();
  CHECK(r.read(a, bytes) == data);
  CHECK(r.allocator->verify().ok());
  r.allocator->free(a);
  r.expect_empty();
}

TEST(segments_freed_while_they_sleep_or_wake_end_exactly_once) {
  for (int round = 0; round < 10; ++round) {
    Rig r(128 * kMiB);
    std::vector<CUdeviceptr> addresses;
    std::vector<SegmentPlan> plans;
    for (int i = 0; i < 8; ++i) {
      addresses.push_back(r.make(kChunk));
      plans.push_back(Rig::whole(addresses.back(), kChunk));
    }
    std::thread freer([&] {
      for (CUdeviceptr address : addresses) r.allocator->free(address);
    });
    (void)r.sleep(plans);
    (void)r.wake(addresses);
    freer.join();
    r.allocator->drain();
    CHECK_EQ(r.allocator->live_segments(), std::size_t{0});
    r.expect_empty();
  }
}

TEST(host_memory_is_released_and_segments_end_while_others_are_digested) {
  Rig r(128 * kMiB);
  r.load_digester();
  const std::size_t bytes = 3 * kChunk;
  const CUdeviceptr a = r.make(bytes);
  const auto data = Rig::pattern(bytes, 22);
  r.write(a, data);
  std::atomic<bool> stop{false};
  std::vector<std::thread> threads;
  threads.emplace_back([&] { churn(r, 1, stop); });
  threads.emplace_back([&] {
    while (!stop) {
      (void)r.allocator->release_host();
      (void)r.allocator->segments();
      (void)r.allocator->load_digester(0, rig::kDigestImage);
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
    }
  });
  for (int round = 0; round < 10; ++round) {
    const CUdeviceptr b = r.make(kChunk);
    threads.emplace_back([&r, b] { r.allocator->free(b); });
    CHECK(r.sleep({Rig::whole(a, bytes), Rig::whole(b, kChunk)}).ok());
    CHECK(r.wake({a, b}).ok());
  }
  stop = true;
  for (std::thread& thread : threads) thread.join();
  CHECK(r.read(a, bytes) == data);
  CHECK(r.allocator->verify().ok());
  r.allocator->free(a);
  r.expect_empty();
}

}  // namespace
