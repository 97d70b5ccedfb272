// Note [Wake is all or nothing]
//
// Everything asked for is created, mapped and restored before any of it is
// published, and no backup is dropped before that. A failure on the way gives
// back what this call mapped; the segments are asleep with their backups, as
// before, and the call can be repeated.
#include <utility>

#include "core/allocator.h"
#include "core/transition.h"

namespace cumem {
namespace {

std::vector<Segment*> select(const WakeRequest& request, Transition& transition) {
  std::vector<Segment*> waking;
  for (CUdeviceptr address : request.segments) {
    Segment* segment = transition.take(address);
    if (segment != nullptr && segment->state == SegmentState::asleep) waking.push_back(segment);
  }
  return waking;
}

Status map_all(const std::vector<Segment*>& waking, WakeResult& result) {
  for (Segment* segment : waking) {
    ContextGuard context(segment->device());
    if (!context.status().ok()) return context.status();
    const std::size_t before = segment->mapped_bytes();
    if (Status status = segment->map(); !status.ok()) return status;
    result.mapped_bytes += segment->mapped_bytes() - before;
  }
  return {};
}

// The fill goes first on the same stream, so a backup always has the last word.
Status restore(Segment& segment, const std::optional<unsigned char>& fill, Transfer& transfer) {
  if (fill && total_bytes(segment.backup.ranges) < segment.bytes()) {
    Status status = transfer.fill({segment.address(), segment.bytes()}, *fill);
    if (!status.ok()) return status;
  }
  return segment.backup.ranges.empty() ? Status{} : transfer.copy(segment.backup);
}

Status restore_all(const std::vector<Segment*>& waking, const WakeRequest& request,
                   WakeResult& result) {
  Transfers transfers(Device::Direction::to_device);
  for (Segment* segment : waking) {
    ContextGuard context(segment->device());
    if (!context.status().ok()) return context.status();
    Status status = restore(*segment, request.fill, transfers.on(segment->device()));
    if (!status.ok()) return status;
  }
  result.restored_bytes = transfers.copied_bytes();
  return transfers.wait();
}

void roll_back(const std::vector<Segment*>& waking) {
  for (Segment* segment : waking) {
    ContextGuard context(segment->device());
    // A refusal leaves the segment asleep with an exact count of mapped bytes;
    // the next sleep or wake of it goes on from there.
    if (context.status().ok()) (void)segment->unmap();
  }
}

// Says how much the device has now that everything is given back.
void add_free_bytes(Allocator& allocator, Status& status) {
  Device* device = nullptr;
  std::size_t total = 0;
  if (status.fault == Fault::device_memory && allocator.device(status.device, &device).ok())
    (void)device->memory(status.free_bytes, total);
}

}  // namespace

Status Allocator::wake(const WakeRequest& request, WakeResult& result) {
  std::lock_guard<std::mutex> operation(operation_);
  RelaxedCapture relaxed(*driver_);
  drain();
  std::vector<Backup> spent;  // dropped last, when everything is awake
  Transition transition(*this);
  Stopwatch watch(result.phases);

  const std::vector<Segment*> waking = select(request, transition);
  Status status = transition.refuse_captures();
  watch.lap("plan");
  if (status.ok()) status = map_all(waking, result);
  watch.lap("map");
  if (status.ok()) status = restore_all(waking, request, result);
  watch.lap("copy");
  if (!status.ok()) {
    roll_back(waking);
    result = {};
    add_free_bytes(*this, status);
    return status;
  }
  transition.publish([&] {
    for (Segment* segment : waking) {
      segment->state = SegmentState::awake;
      result.segments.push_back(segment->address());
      spent.push_back(std::exchange(segment->backup, Backup{}));
    }
  });
  spent.clear();
  if (!host_.config().retain) host_.release_idle();
  return {};
}

}  // namespace cumem
