// How is a backup read while its segment stays asleep?
#include <algorithm>
#include <cstring>

#include "core/allocator.h"
#include "core/transition.h"

namespace cumem {
namespace {

// What a step of a copy read, of the bytes that are wanted; 0: they are not there.
struct Step {
  std::size_t bytes = 0;
  Status status = {};
};

std::size_t common(const Range& wanted, const Range& kept) noexcept {
  const bool starts = wanted.address >= kept.address && wanted.address < kept.end();
  return starts ? std::min<std::size_t>(wanted.bytes, kept.end() - wanted.address) : 0;
}

Status copy_from_host(const HostBlock& host, std::size_t offset, std::size_t bytes,
                      std::byte* out) {
  return host.visit(offset, bytes, [&out](const std::byte* data, std::size_t step) {
    std::memcpy(out, data, step);
    out += step;
    return Status{};
  });
}

Step copy_saved(const Backup& backup, const Range& wanted, std::byte* out) {
  std::size_t offset = 0;
  for (const Range& kept : backup.ranges) {
    if (const std::size_t bytes = common(wanted, kept); bytes > 0) {
      const std::size_t at = offset + (wanted.address - kept.address);
      if (backup.disk.bytes() == 0) return {bytes, copy_from_host(backup.host, at, bytes, out)};
      return {bytes, backup.disk.file().read(backup.disk.offset() + at, out, bytes)};
    }
    offset += kept.bytes;
  }
  return {};
}

Step copy_from_source(const Segment& segment, const Range& wanted, std::byte* out) {
  for (const FilePart& part : segment.backup.reload) {
    const std::size_t bytes = common(wanted, part.range);
    if (bytes == 0) continue;
    const File& file = *segment.source->file;
    Status status = file.prove();
    if (status.ok())
      status = file.read(part.offset + (wanted.address - part.range.address), out, bytes);
    return {bytes, status};
  }
  return {};
}

// pre: the segment is asleep, and a context is current.
Status copy_out(const Segment& segment, Range range, std::byte* out) {
  while (range.bytes > 0) {
    Step step = copy_saved(segment.backup, range, out);
    if (step.bytes == 0) step = copy_from_source(segment, range, out);
    if (step.bytes == 0)
      return failure(Fault::invalid, "contents that have no backup", range.bytes);
    if (!step.status.ok()) return step.status;
    out += step.bytes;
    range = {range.address + step.bytes, range.bytes - step.bytes};
  }
  return {};
}

}  // namespace

// The segment is taken, not locked: copying takes seconds, and a free that comes
// in between must find its way.
Status Allocator::read_backup(const Range& range, std::byte* out) {
  std::lock_guard<std::mutex> operation(operation_);
  CUdeviceptr start = 0;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    if (const Segment* segment = around(range.address)) start = segment->address();
  }
  Transition transition(*this);
  Segment* const segment = start != 0 ? transition.take(start) : nullptr;
  if (segment == nullptr || segment->state != SegmentState::asleep)
    return failure(Fault::invalid, "memory that is not asleep", range.bytes);
  RelaxedCapture relaxed(*driver_);
  ContextGuard context(segment->device());
  return context.status().ok() ? copy_out(*segment, range, out) : context.status();
}

}  // namespace cumem
