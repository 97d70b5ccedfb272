// Owns a point in a stream's work: cuEventCreate .. cuEventDestroy.
#pragma once

#include <cuda.h>

#include <utility>

#include "core/device.h"
#include "core/status.h"

namespace cumem {

class Event {
 public:
  Event() = default;
  Event(Event&& other) noexcept { swap(other); }
  Event& operator=(Event&& other) noexcept {
    Event taken(std::move(other));
    swap(taken);
    return *this;
  }
  ~Event() {
    if (device_ == nullptr) return;
    ContextGuard context(*device_);
    Status status =
        check(device_->driver().cuEventDestroy(event_), "cuEventDestroy", 0, device_->ordinal());
    if (!status.ok()) device_->driver().refuse(status);
  }

  // Creates the event, at first use, and puts it behind what `stream` was given.
  // pre: the device's context is current.
  Status record(const Device& device, CUstream stream) noexcept {
    const Driver& driver = device.driver();
    // Blocking: a thread that waits must not burn a processor.
    constexpr unsigned flags = CU_EVENT_BLOCKING_SYNC | CU_EVENT_DISABLE_TIMING;
    if (device_ == nullptr) {
      Status status =
          check(driver.cuEventCreate(&event_, flags), "cuEventCreate", 0, device.ordinal());
      if (!status.ok()) return status;
      device_ = &device;
    }
    return check(driver.cuEventRecord(event_, stream), "cuEventRecord", 0, device.ordinal());
  }

  // Waits on this thread until the work before it is done. pre: it was recorded.
  Status wait() const noexcept {
    return check(device_->driver().cuEventSynchronize(event_), "cuEventSynchronize", 0,
                 device_->ordinal());
  }

  // Is that work done? pre: it was recorded.
  bool reached() const noexcept { return device_->driver().cuEventQuery(event_) == CUDA_SUCCESS; }

  // Makes `stream` wait for it, without this thread. pre: it was recorded.
  Status hold(CUstream stream) const noexcept {
    return check(device_->driver().cuStreamWaitEvent(stream, event_, CU_EVENT_WAIT_DEFAULT),
                 "cuStreamWaitEvent", 0, device_->ordinal());
  }

 private:
  void swap(Event& other) noexcept {
    std::swap(device_, other.device_);
    std::swap(event_, other.event_);
  }
  const Device* device_ = nullptr;
  CUevent event_ = nullptr;
};

}  // namespace cumem
