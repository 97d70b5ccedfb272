// How does a worker touch memory without holding World::mutex?
//
// See Note [Moving memory] in stream.h.
#pragma once

#include <iterator>
#include <list>

#include "emulator/world.h"

namespace cumem::emulator {

// Notes memory as being moved, and lets the mutex go meanwhile. A range may be empty.
class Moving {
 public:
  Moving(World& world, Lock& lock, const Range& device, const Range& host)
      : world_(world), lock_(lock) {
    noted_.push_back(device);
    noted_.push_back(host);
    first_ = noted_.begin();
    world_.moving.splice(world_.moving.end(), noted_);
    lock_.unlock();
  }
  ~Moving() {
    lock_.lock();
    world_.moving.erase(std::next(first_));
    world_.moving.erase(first_);
    world_.changed.notify_all();
  }
  Moving(const Moving&) = delete;
  Moving& operator=(const Moving&) = delete;

 private:
  World& world_;
  Lock& lock_;
  std::list<Range> noted_;
  std::list<Range>::iterator first_;
};

// Lets time pass until then; false when the context died meanwhile.
inline bool sleep_until(World& world, Lock& lock, const Context& context, Clock::time_point then) {
  world.changed.wait_until(lock, then, [&] { return context.dead(); });
  return !context.dead();
}

// How long that many bytes take at `bandwidth` bytes a second; 0: no time.
inline std::chrono::nanoseconds time_for(std::size_t bytes, std::uint64_t bandwidth) {
  if (bandwidth == 0) return std::chrono::nanoseconds(0);
  const double seconds = static_cast<double>(bytes) / static_cast<double>(bandwidth);
  return std::chrono::nanoseconds(static_cast<std::int64_t>(seconds * 1e9));
}

}  // namespace cumem::emulator
