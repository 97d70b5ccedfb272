#include "core/transfer.h"

#include <utility>

namespace cumem {

Status Transfer::open() {
  return stream_ != nullptr ? Status{} : device_.copy_stream(direction_, &stream_);
}

Status Transfer::copy(const Backup& backup) {
  std::size_t offset = 0;
  std::vector<FilePart> parts;
  for (const Range& range : backup.ranges) {
    parts.push_back({range, offset});
    offset += range.bytes;
  }
  return backup.disk.bytes() > 0 ? move(backup.disk, std::move(parts)) : copy(parts, backup.host);
}

Status Transfer::copy(const Range& range, const Backup& backup, std::size_t offset) {
  const std::vector<FilePart> parts{{range, offset}};
  return backup.disk.bytes() > 0 ? move(backup.disk, parts) : copy(parts, backup.host);
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

// What is pinned is submitted; what is not comes last, all at once, so that threads can share it.
Status Transfer::copy(const std::vector<FilePart>& parts, const HostBlock& host) {
  if (Status status = open(); !status.ok()) return status;
  std::vector<FilePart> pageable;
  for (const FilePart& part : parts) {
    Status status =
        host.visit_spans(part.offset, part.range.bytes, [&](const HostSpan& span) -> Status {
          const CUdeviceptr at = part.range.address + (span.offset - part.offset);
          const FilePart one{{at, span.bytes}, span.offset};
          if (pinned(span)) return submit(one, host);
          pageable.push_back(one);
          return {};
        });
    if (!status.ok()) return status;
  }
  return pageable.empty() ? Status{} : stage(pageable, host);
}

// Where there are no slots either, the driver stages the copies itself.
Status Transfer::stage(const std::vector<FilePart>& parts, const HostBlock& host) {
  bool ready = false;
  if (Status status = staging_.pin_slots(parts, ready); !status.ok()) return status;
  if (ready) {
    copied_bytes_ += total_bytes(parts);
    return direction_ == Device::Direction::to_host ? staging_.write(host, parts)
                                                    : staging_.read(host, parts);
  }
  for (const FilePart& part : parts)
    if (Status status = submit(part, host); !status.ok()) return status;
  return {};
}

// One copy for each part that is contiguous on both sides.
Status Transfer::submit(const FilePart& part, const HostBlock& host) {
  const Driver& driver = device_.driver();
  CUdeviceptr at = part.range.address;
  return host.visit(part.offset, part.range.bytes, [&](std::byte* data, std::size_t bytes) {
    const CUdeviceptr from = std::exchange(at, at + bytes);
    copied_bytes_ += bytes;
    return direction_ == Device::Direction::to_host
               ? check(driver.cuMemcpyDtoHAsync(data, from, bytes, stream_), "cuMemcpyDtoHAsync",
                       bytes, device_.ordinal())
               : check(driver.cuMemcpyHtoDAsync(from, data, bytes, stream_), "cuMemcpyHtoDAsync",
                       bytes, device_.ordinal());
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
