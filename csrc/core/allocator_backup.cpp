// How is a backup read while its segment stays asleep?
#include <cstring>

#include "core/allocator.h"
#include "core/transfer.h"
#include "core/transition.h"

namespace cumem {
namespace {

// pre: the segment is asleep, and a context is current.
Status copy_out(const Backup& backup, const Range& range, std::byte* out) {
  // What sleeps to a file, or comes back from one, has nothing in host memory.
  if (backup.host.bytes() < total_bytes(backup.ranges))
    return failure(Fault::invalid, "contents that are not in host memory", range.bytes);
  std::size_t offset = 0;
  for (const Range& kept : backup.ranges) {
    if (range.address >= kept.address && range.end() <= kept.end())
      return backup.host.visit(offset + (range.address - kept.address), range.bytes,
                               [&out](const std::byte* data, std::size_t bytes) {
                                 std::memcpy(out, data, bytes);
                                 out += bytes;
                                 return Status{};
                               });
    offset += kept.bytes;
  }
  return failure(Fault::invalid, "contents that have no backup", range.bytes);
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
  return context.status().ok() ? copy_out(segment->backup, range, out) : context.status();
}

}  // namespace cumem
