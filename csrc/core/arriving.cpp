#include "core/arriving.h"

#include <utility>

namespace cumem {

std::vector<Segment*> select_arriving(const WakeRequest& request, Transition& transition) {
  std::vector<Segment*> arriving;
  for (CUdeviceptr address : request.segments) {
    Segment* segment = transition.take(address);
    if (segment != nullptr && segment->state == SegmentState::asleep) arriving.push_back(segment);
  }
  return arriving;
}

Status map_and_restore(Segment& segment, const std::optional<unsigned char>& fill,
                       Transfer& transfer, PhysicalPool* pool) {
  if (Status status = segment.map(pool); !status.ok()) return status;
  // The fill goes first on the same stream, so a backup always has the last word.
  const Backup& backup = segment.backup;
  if (fill && total_bytes(backup.ranges) + total_bytes(backup.reload) < segment.bytes()) {
    Status status = transfer.fill({segment.address(), segment.bytes()}, *fill);
    if (!status.ok()) return status;
  }
  if (!backup.ranges.empty())
    if (Status status = transfer.copy(backup); !status.ok()) return status;
  if (backup.reload.empty()) return {};
  const Source& source = *segment.source;
  if (Status status = source.file->prove(); !status.ok()) return status;
  return source.mapped ? transfer.read(*source.file, *source.mapped, backup.reload)
                       : transfer.read(*source.file, backup.reload);
}

Status wait_and_prove(Segment& segment, Transfer& transfer, Digester* digester) {
  if (segment.backup.reload.empty()) return {};
  if (Status status = transfer.wait(); !status.ok()) return status;
  return prove_reloaded(*segment.source, segment.backup, segment.device(), digester);
}

void publish_awake(const std::vector<Segment*>& segments, bool retain, Transition& transition,
                   WakeResult& result, std::vector<Backup>& spent) {
  std::vector<std::unique_ptr<Source>> used_up;  // closed when the mutex is free
  transition.publish([&] {
    for (Segment* segment : segments) {
      if (segment->source && !segment->source->keep) {
        used_up.push_back(std::move(segment->source));
        segment->backup.reload.clear();
      }
      segment->state = SegmentState::awake;
      result.segments.push_back(segment->address());
      result.mapped_bytes += segment->bytes();
      if (!retain) spent.push_back(std::exchange(segment->backup, Backup{}));
    }
  });
}

void unmap_all(const std::vector<Segment*>& segments) {
  for (Segment* segment : segments) {
    ContextGuard context(segment->device());
    if (context.status().ok()) (void)segment->unmap();
  }
}

void add_free_bytes(Device* device, Status& status) {
  std::size_t total = 0;
  if (status.fault == Fault::device_memory && device != nullptr)
    (void)device->memory(status.free_bytes, total);
}

}  // namespace cumem
