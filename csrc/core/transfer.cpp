#include "core/transfer.h"

#include <algorithm>

namespace cumem {

std::size_t total_bytes(const std::vector<Range>& ranges) noexcept {
  std::size_t bytes = 0;
  for (const Range& range : ranges) bytes += range.bytes;
  return bytes;
}

Status Transfer::open() {
  return stream_ != nullptr ? Status{} : device_.copy_stream(direction_, &stream_);
}

Status Transfer::submit(CUdeviceptr device, std::byte* host, std::size_t bytes) {
  const Driver& driver = device_.driver();
  copied_bytes_ += bytes;
  if (direction_ == Device::Direction::to_host)
    return check(driver.cuMemcpyDtoHAsync(host, device, bytes, stream_), "cuMemcpyDtoHAsync", bytes,
                 device_.ordinal());
  return check(driver.cuMemcpyHtoDAsync(device, host, bytes, stream_), "cuMemcpyHtoDAsync", bytes,
               device_.ordinal());
}

// Submits a copy for each piece that is contiguous on both sides.
Status Transfer::copy(const Backup& backup) {
  if (Status status = open(); !status.ok()) return status;
  auto span = backup.host.spans().begin();
  std::size_t used = 0;  // of that span
  for (const Range& range : backup.ranges) {
    for (std::size_t done = 0; done < range.bytes;) {
      if (used == span->bytes) {
        ++span;
        used = 0;
      }
      const std::size_t step = std::min(range.bytes - done, span->bytes - used);
      Status status = submit(range.address + done, span->data + used, step);
      if (!status.ok()) return status;
      done += step;
      used += step;
    }
  }
  return {};
}

Status Transfer::fill(const Range& range, unsigned char value) {
  if (Status status = open(); !status.ok()) return status;
  return check(device_.driver().cuMemsetD8Async(range.address, value, range.bytes, stream_),
               "cuMemsetD8Async", range.bytes, device_.ordinal());
}

Status Transfer::wait() {
  if (stream_ == nullptr) return {};
  return check(device_.driver().cuStreamSynchronize(stream_), "cuStreamSynchronize", 0,
               device_.ordinal());
}

}  // namespace cumem
