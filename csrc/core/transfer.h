// How do bytes move between a device and its backups?
//
// On a non-blocking stream of our own per device, in as few copies as the
// ranges and the arena's spans allow. Everything is submitted first; wait()
// ends the work. The caller has waited for the device before, so there is
// nothing on other streams to order against.
#pragma once

#include <cuda.h>

#include <cstddef>
#include <vector>

#include "core/device.h"
#include "core/host_store.h"
#include "core/segment.h"
#include "core/status.h"

namespace cumem {

class Transfer {
 public:
  explicit Transfer(const Device& device) : device_(device) {}
  ~Transfer();
  Transfer(const Transfer&) = delete;
  Transfer& operator=(const Transfer&) = delete;

  // The calls below need the device's context to be current.

  // Submits copies of all ranges of `backup` to its host block, or back.
  // pre: the host block has at least as many bytes as the ranges.
  // After a failure copies may still be running: wait() before the memory goes.
  Status copy_out(const Backup& backup);
  Status copy_in(const Backup& backup);

  // Submits a fill of a whole range with one byte value.
  Status fill(const Range& range, unsigned char value);

  // Waits for everything submitted. Safe to call when nothing was.
  Status wait();

  std::size_t copied_bytes() const noexcept { return copied_bytes_; }

 private:
  Status open();
  template <class Submit>
  Status walk(const Backup& backup, const Submit& submit);

  const Device& device_;
  CUstream stream_ = nullptr;
  std::size_t copied_bytes_ = 0;
};

// Bytes in all ranges together.
std::size_t total_bytes(const std::vector<Range>& ranges) noexcept;

}  // namespace cumem
