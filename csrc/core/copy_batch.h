// How are many small copies submitted without paying for each?
//
// Copies are gathered and handed to the driver together, where it can take many in one
// call: it costs 3 to 14 microseconds to submit a copy and the link pauses between two, so
// that copies of 512 KiB run at 43 GB/s one by one and at 53 together, and of 64 KiB at 17
// and at 41 (measured). A few, and large ones, gain nothing and go one by one.
#pragma once

#include <cuda.h>

#include <cstddef>
#include <vector>

#include "core/device.h"
#include "core/status.h"

namespace cumem {

class CopyBatch {
 public:
  CopyBatch(Device& device, Device::Direction direction) : device_(device), direction_(direction) {}

  // Gathers a copy between `at` on the device and `host`; the driver gets those that were
  // gathered when they are worth a call. In which order they run is not said. pre: the
  // device's context is current; `host` is pinned, and does not cross from one pinned piece
  // to another.
  Status add(CUdeviceptr at, std::byte* host, std::size_t bytes, CUstream stream);
  // Submits one copy by itself, now: for memory that is not pinned a call for many wants to
  // be told where it lies. pre: the device's context is current.
  Status copy(CUdeviceptr at, std::byte* host, std::size_t bytes, CUstream stream);
  // Submits what was gathered. After a failure, here or in add(), some of it may run and some
  // is lost, so every call fails until clear().
  Status submit(CUstream stream);
  // Forgets what was gathered, and a failure.
  void clear() noexcept;

 private:
  void forget() noexcept;
  Status submit_one(CUdeviceptr at, std::byte* host, std::size_t bytes, CUstream stream) const;
  Status submit_each(CUstream stream) const;
  Status submit_together(CUstream stream);
  bool worth_one_call() const noexcept;

  Device& device_;
  const Device::Direction direction_;
  std::vector<CUdeviceptr> on_device_;
  std::vector<CUdeviceptr> on_host_;
  std::vector<std::size_t> sizes_;
  std::size_t bytes_ = 0;
  Status lost_;  // why copies were not submitted
};

}  // namespace cumem
