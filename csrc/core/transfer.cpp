#include "core/transfer.h"

#include <algorithm>

namespace cumem {

std::size_t total_bytes(const std::vector<Range>& ranges) noexcept {
  std::size_t bytes = 0;
  for (const Range& range : ranges) bytes += range.bytes;
  return bytes;
}

Transfer::~Transfer() {
  if (stream_ == nullptr) return;
  const Driver& driver = device_.driver();
  Status status = check(driver.cuStreamDestroy(stream_), "cuStreamDestroy", 0, device_.ordinal());
  if (!status.ok()) driver.refuse(status);
}

Status Transfer::open() {
  if (stream_ != nullptr) return {};
  return check(device_.driver().cuStreamCreate(&stream_, CU_STREAM_NON_BLOCKING), "cuStreamCreate",
               0, device_.ordinal());
}

// Calls submit(device address, host address, bytes) for each piece that is
// contiguous on both sides.
template <class Submit>
Status Transfer::walk(const Backup& backup, const Submit& submit) {
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
      copied_bytes_ += step;
    }
  }
  return {};
}

Status Transfer::copy_out(const Backup& backup) {
  return walk(backup, [this](CUdeviceptr device, std::byte* host, std::size_t bytes) {
    return check(device_.driver().cuMemcpyDtoHAsync(host, device, bytes, stream_),
                 "cuMemcpyDtoHAsync", bytes, device_.ordinal());
  });
}

Status Transfer::copy_in(const Backup& backup) {
  return walk(backup, [this](CUdeviceptr device, std::byte* host, std::size_t bytes) {
    return check(device_.driver().cuMemcpyHtoDAsync(device, host, bytes, stream_),
                 "cuMemcpyHtoDAsync", bytes, device_.ordinal());
  });
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
