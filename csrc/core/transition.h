// How does an operation work on segments without holding the registry's mutex?
//
// It marks them. While a Transition lives, its segments stay where they are and
// only it may map, unmap or copy them; a free that comes in between dooms a
// segment, and the end of the Transition ends it.
#pragma once

#include <chrono>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "core/allocator.h"
#include "core/threads.h"
#include "core/transfer.h"

namespace cumem {

class Transition {
 public:
  // pre: the caller holds operation_ of `allocator`, and nothing else.
  explicit Transition(Allocator& allocator) : allocator_(allocator) {}
  ~Transition();
  Transition(const Transition&) = delete;
  Transition& operator=(const Transition&) = delete;

  // Takes the segment that starts at `address`, if it is there.
  Segment* take(CUdeviceptr address);

  const std::vector<Segment*>& segments() const noexcept { return segments_; }

  // Publishes a change of the fields that other threads read.
  template <class Change>
  void publish(const Change& change) {
    std::lock_guard<std::mutex> lock(allocator_.mutex_);
    change();
  }

  // The devices of the segments taken so far.
  std::vector<Device*> devices() const;
  // A capture on one of them: nothing may be waited for.
  Status refuse_captures() const;

 private:
  Allocator& allocator_;
  std::vector<Segment*> segments_;
};

// Waits for all work on the devices of a transition.
Status wait_for_devices(const Transition& transition);

// One Transfer per device. Destruction waits for what was submitted and forgets the rest,
// so it must be declared after everything that copies read or write.
class Transfers {
 public:
  Transfers(Device::Direction direction, const FileMeans& means)
      : direction_(direction), means_(means) {}
  ~Transfers();
  Transfers(const Transfers&) = delete;
  Transfers& operator=(const Transfers&) = delete;

  // The device's transfer. Calls from several threads are for different devices,
  // after a first call for each from one thread.
  Transfer& on(Device& device);
  Status wait();  // as Transfer::wait(), for all
  std::size_t copied_bytes() const noexcept;

 private:
  const Device::Direction direction_;
  const FileMeans means_;
  std::map<Device*, std::unique_ptr<Transfer>> transfers_;
};

// Runs work(device) -> Status with the device's context current: for one device
// here, for several at once, each on a thread of its own. Returns the first failure,
// when all have ended.
template <class Work>
Status on_each(const std::vector<Device*>& devices, const Work& work) {
  std::vector<Status> statuses(devices.size());
  auto run = [&](std::size_t i) {
    RelaxedCapture relaxed(devices[i]->driver());
    ContextGuard context(*devices[i]);
    statuses[i] = context.status().ok() ? work(*devices[i]) : context.status();
  };
  on_threads(devices.size(), run);
  for (const Status& status : statuses)
    if (!status.ok()) return status;
  return {};
}

// Adds the time since the last lap to a named phase.
class Stopwatch {
 public:
  explicit Stopwatch(Phases& phases) : phases_(phases) {}
  void lap(const std::string& phase) {
    const auto now = std::chrono::steady_clock::now();
    phases_[phase] += std::chrono::duration<double>(now - last_).count();
    last_ = now;
  }

 private:
  Phases& phases_;
  std::chrono::steady_clock::time_point last_ = std::chrono::steady_clock::now();
};

}  // namespace cumem
