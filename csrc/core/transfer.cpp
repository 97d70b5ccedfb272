#include "core/transfer.h"

#include <utility>

namespace cumem {
namespace {

// From a file's own pages. The driver may have the processor read what is smaller, and that
// ends the process where the file was cut short meanwhile.
constexpr std::size_t kLeastFetched = std::size_t{1} << 20;

}  // namespace

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

// Takes off `part` what was submitted, or is for the ring.
MappedFile::Visited Transfer::fetch(FilePart& part, MappedFile& pages,
                                    std::vector<FilePart>& others) {
  return pages.visit(part.offset, part.range.bytes, [&](std::byte* data, std::size_t bytes) {
    const FilePart step{{part.range.address, bytes}, part.offset};
    part.range.address += bytes;
    part.range.bytes -= bytes;
    part.offset += bytes;
    if (bytes < kLeastFetched) {
      others.push_back(step);
      return Status{};
    }
    copied_bytes_ += bytes;
    means_.moved_bytes += bytes;
    return batch_.add(step.range.address, data, bytes, stream_);
  });
}

Status Transfer::read(const File& file, MappedFile& pages, const std::vector<FilePart>& parts) {
  if (Status status = open(); !status.ok()) return status;
  std::vector<FilePart> others;
  bool refused = false;
  for (FilePart part : parts) {
    if (!refused) {
      const MappedFile::Visited visited = fetch(part, pages, others);
      if (!visited.copying.ok()) return visited.copying;
      refused = !visited.pinning.ok();
      if (refused && !means_.host.config().allow_pageable) return visited.pinning;
    }
    if (part.range.bytes > 0) others.push_back(part);
  }
  return others.empty() ? Status{} : read(file, others);
}

// What is pinned is submitted; what is not comes last, all at once, so that threads can share it.
Status Transfer::copy(const std::vector<FilePart>& parts, const HostBlock& host) {
  if (Status status = open(); !status.ok()) return status;
  std::vector<FilePart> pageable;
  for (const FilePart& part : parts) {
    Status status =
        host.visit_spans(part.offset, part.range.bytes, [&](const HostSpan& span) -> Status {
          const CUdeviceptr at = part.range.address + (span.offset - part.offset);
          if (!pinned(span)) {
            pageable.push_back({{at, span.bytes}, span.offset});
            return {};
          }
          copied_bytes_ += span.bytes;
          return batch_.add(at, span.data, span.bytes, stream_);
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
    if (Status status = copy_unpinned(part, host); !status.ok()) return status;
  return {};
}

// One copy for each part that is contiguous on both sides.
Status Transfer::copy_unpinned(const FilePart& part, const HostBlock& host) {
  CUdeviceptr at = part.range.address;
  return host.visit(part.offset, part.range.bytes, [&](std::byte* data, std::size_t bytes) {
    copied_bytes_ += bytes;
    return batch_.copy(std::exchange(at, at + bytes), data, bytes, stream_);
  });
}

Status Transfer::submit() { return batch_.submit(stream_); }

Status Transfer::fill(const Range& range, unsigned char value) {
  if (Status status = open(); !status.ok()) return status;
  return check(device_.driver().cuMemsetD8Async(range.address, value, range.bytes, stream_),
               "cuMemsetD8Async", range.bytes, device_.ordinal());
}

Status Transfer::mark(Event& event) {
  Status status = open();
  if (status.ok()) status = submit();
  return status.ok() ? event.record(device_, stream_) : status;
}

Status Transfer::wait() {
  if (stream_ == nullptr) return {};
  const Status submitted = submit();
  const Status waited = wait_for_driver();
  return submitted.ok() ? waited : submitted;
}

Status Transfer::stop() {
  batch_.clear();
  return stream_ == nullptr ? Status{} : wait_for_driver();
}

// Memory goes after this, so a refusal is answered by asking once more.
Status Transfer::wait_for_driver() {
  Status status = device_.wait_for_copies(direction_);
  if (!status.ok()) (void)device_.wait_for_copies(direction_);
  return status;
}

}  // namespace cumem
