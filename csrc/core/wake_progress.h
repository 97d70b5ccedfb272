// Which segments of a wake under way can be used already?
//
// A wake that is given one publishes piece by piece. Other threads ask for the
// segment that they need: they wait on the host until it is mapped and its copies
// are submitted, and let their stream wait for the copies.
#pragma once

#include <cuda.h>

#include <condition_variable>
#include <map>
#include <memory>
#include <mutex>

#include "core/event.h"
#include "core/segment.h"
#include "core/status.h"

namespace cumem {

class WakeProgress {
 public:
  // Says that the wake will bring this segment. To be called before the wake starts and
  // before anybody asks.
  void expect(const Range& segment);

  // For the wake: this segment's bytes are on their way; it is awake.
  void submitted(const Segment& segment, Event event);
  void arrived(const Segment& segment);
  // No more will come; only the first call counts. From here on nothing of the
  // allocator is used, but by calls below that are under way.
  void finish(const Status& status);

  // Makes `stream` wait for the bytes at `address`, after waiting on this thread until
  // they are on their way. Success at once for memory this wake does not bring. Fails
  // with the wake's own failure when the segment stays asleep.
  Status hold(CUdeviceptr address, CUstream stream);
  // The same, but waits on this thread until the bytes are there.
  Status wait(CUdeviceptr address);
  // Are the bytes at `address` there? True for memory this wake does not bring.
  bool reached(CUdeviceptr address);

 private:
  struct Entry {
    Range range;
    Device* device = nullptr;
    std::shared_ptr<const Event> event;  // while it is submitted and has not arrived
    bool arrived = false;
  };
  // The event that stands for the bytes at `address`, or null with success (they are
  // there, or are not this wake's) or the failure. Waits until one of these is known.
  std::shared_ptr<const Event> await(CUdeviceptr address, Device*& device, Status& status);
  Entry* around(CUdeviceptr address);

  std::mutex mutex_;
  std::condition_variable changed_;
  std::map<CUdeviceptr, Entry> entries_;
  bool finished_ = false;
  Status status_;
};

}  // namespace cumem
