#include "core/transfer.h"

#include <utility>

namespace cumem {

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

Status Transfer::copy(const Backup& backup) {
  std::size_t offset = 0;
  if (backup.disk.bytes() > 0) {
    std::vector<FilePart> parts;
    for (const Range& range : backup.ranges) {
      parts.push_back({range, offset});
      offset += range.bytes;
    }
    return move(backup.disk, std::move(parts));
  }
  for (const Range& range : backup.ranges) {
    if (Status status = copy(range, backup.host, offset); !status.ok()) return status;
    offset += range.bytes;
  }
  return {};
}

Status Transfer::copy(const Range& range, const Backup& backup, std::size_t offset) {
  return backup.disk.bytes() > 0 ? move(backup.disk, {{range, offset}})
                                 : copy(range, backup.host, offset);
}

// The parts' offsets count from the start of the block.
Status Transfer::move(const FileBlock& disk, std::vector<FilePart> parts) {
  if (Status status = open(); !status.ok()) return status;
  for (FilePart& part : parts) {
    part.offset += disk.offset();
    copied_bytes_ += part.range.bytes;
  }
  return direction_ == Device::Direction::to_host ? staging_.write(disk.file(), parts)
                                                  : staging_.read(disk.file(), parts);
}

Status Transfer::read(const File& file, const std::vector<FilePart>& parts) {
  if (Status status = open(); !status.ok()) return status;
  for (const FilePart& part : parts) copied_bytes_ += part.range.bytes;
  return staging_.read(file, parts);
}

// One copy for each part that is contiguous on both sides.
Status Transfer::copy(const Range& range, const HostBlock& host, std::size_t offset) {
  if (Status status = open(); !status.ok()) return status;
  CUdeviceptr at = range.address;
  return host.visit(offset, range.bytes, [&](std::byte* data, std::size_t bytes) {
    Status status = submit(at, data, bytes);
    at += bytes;
    return status;
  });
}

Status Transfer::fill(const Range& range, unsigned char value) {
  if (Status status = open(); !status.ok()) return status;
  return check(device_.driver().cuMemsetD8Async(range.address, value, range.bytes, stream_),
               "cuMemsetD8Async", range.bytes, device_.ordinal());
}

Status Transfer::mark(Event& event) {
  if (Status status = open(); !status.ok()) return status;
  return event.record(device_, stream_);
}

// Memory goes after a wait, so a refusal is answered by asking once more.
Status Transfer::wait() {
  if (stream_ == nullptr) return {};
  Status status = device_.wait_for_copies(direction_);
  if (!status.ok()) (void)device_.wait_for_copies(direction_);
  return status;
}

}  // namespace cumem
