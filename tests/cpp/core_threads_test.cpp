// Is everything done, and does the process live on, where the system has no thread left?
#include <pthread.h>

#include <atomic>
#include <vector>

#include "core/threads.h"
#include "core_rig.h"

namespace {

// No thread can be made while it lives: none finds room for such a stack.
class NoThreads {
 public:
  NoThreads() {
    REQUIRE(pthread_getattr_default_np(&before_) == 0);
    pthread_attr_t huge;
    pthread_attr_init(&huge);
    pthread_attr_setstacksize(&huge, std::size_t{1} << 46);
    REQUIRE(pthread_setattr_default_np(&huge) == 0);
    pthread_attr_destroy(&huge);
    cumem::Threads none;
    if (none.start([] {})) SKIP("this build makes threads with stacks of its own choice");
  }
  ~NoThreads() {
    pthread_setattr_default_np(&before_);
    pthread_attr_destroy(&before_);
  }
  NoThreads(const NoThreads&) = delete;
  NoThreads& operator=(const NoThreads&) = delete;

 private:
  pthread_attr_t before_;
};

TEST(each_part_of_the_work_is_done_once) {
  std::vector<std::atomic<int>> done(9);
  cumem::on_threads(done.size(), [&](std::size_t i) { ++done[i]; });
  for (const auto& times : done) CHECK_EQ(times.load(), 1);
  cumem::on_threads(0, [&](std::size_t i) { ++done[i]; });
}

TEST(work_is_done_also_without_threads) {
  NoThreads none;
  std::vector<int> done(9);
  cumem::on_threads(done.size(), [&](std::size_t i) { ++done[i]; });
  for (int times : done) CHECK_EQ(times, 1);
}

TEST(host_memory_is_made_ready_also_without_threads) {
  rig::Rig r;
  cumem::Device* device = nullptr;
  REQUIRE(r.allocator->device(0, &device).ok());
  cumem::ContextGuard context(*device);
  NoThreads none;
  CHECK(r.allocator->host().prepare(16 * kMiB, *device).ok());
  CHECK_EQ(r.allocator->host().usage().idle_bytes, 16 * kMiB);
}

}  // namespace
