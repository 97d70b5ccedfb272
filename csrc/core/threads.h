// How is work spread over threads where the system may have none left?
#pragma once

#include <cstddef>
#include <exception>
#include <thread>
#include <utility>
#include <vector>

namespace cumem {

// Threads that are waited for, whichever way their owner's scope is left.
class Threads {
 public:
  Threads() = default;
  ~Threads() { join(); }
  Threads(const Threads&) = delete;
  Threads& operator=(const Threads&) = delete;

  // False: the system has no more threads, or no memory for one.
  template <class Work>
  bool start(Work work) {
    try {
      threads_.emplace_back(std::move(work));
      return true;
    } catch (const std::exception&) {
      return false;
    }
  }
  void join() {
    for (std::thread& thread : threads_) thread.join();
    threads_.clear();
  }

 private:
  std::vector<std::thread> threads_;
};

// Calls work(0) .. work(count - 1), each on a thread of its own, the first on this one; what
// there is no thread for comes after it. Returns when all have ended.
template <class Work>
void on_threads(std::size_t count, const Work& work) {
  Threads threads;
  std::size_t next = 1;
  while (next < count && threads.start([&work, next] { work(next); })) ++next;
  if (count > 0) work(0);
  for (; next < count; ++next) work(next);
}

}  // namespace cumem
