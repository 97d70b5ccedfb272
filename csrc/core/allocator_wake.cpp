// Note [Wake is all or nothing]
//
// Everything asked for is created, mapped and restored before any of it is
// published, and no backup is dropped before that. While one segment's bytes are
// on their way the next one is created and mapped, so that the driver's calls hide
// behind the copies. A failure waits for the copies and gives back what this call
// mapped; the segments are asleep with their backups, as before, and the call can
// be repeated.
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

// The fill goes first on the same stream, so a backup always has the last word.
Status restore(Segment& segment, const std::optional<unsigned char>& fill, Transfer& transfer) {
  if (fill && total_bytes(segment.backup.ranges) < segment.bytes()) {
    Status status = transfer.fill({segment.address(), segment.bytes()}, *fill);
    if (!status.ok()) return status;
  }
  return segment.backup.ranges.empty() ? Status{} : transfer.copy(segment.backup);
}

// pre: the segment's context is current.
Status map_and_restore(Segment& segment, const WakeRequest& request, Transfer& transfer) {
  Status status = segment.map();
  return status.ok() ? restore(segment, request.fill, transfer) : status;
}

Status wake_all(const std::vector<Segment*>& waking, const std::vector<Device*>& devices,
                const WakeRequest& request, WakeResult& result) {
  Transfers transfers(Device::Direction::to_device);
  Stopwatch watch(result.phases);
  for (Device* device : devices) transfers.on(*device);
  Status status = on_each(devices, [&](Device& device) {
    for (Segment* segment : waking) {
      if (&segment->device() != &device) continue;
      Status one = map_and_restore(*segment, request, transfers.on(device));
      if (!one.ok()) return one;
    }
    return Status{};
  });
  watch.lap("map_and_submit");
  if (status.ok()) status = transfers.wait();
  watch.lap("copy");
  result.restored_bytes = transfers.copied_bytes();
  return status;
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
  const bool retain = host_.config().retain;
  std::vector<Backup> spent;  // dropped last, when everything is awake
  Transition transition(*this);

  const std::vector<Segment*> waking = select(request, transition);
  Status status = transition.refuse_captures();
  if (status.ok()) status = wake_all(waking, transition.devices(), request, result);
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
      result.mapped_bytes += segment->bytes();
      if (!retain) spent.push_back(std::exchange(segment->backup, Backup{}));
    }
  });
  spent.clear();
  if (!retain) host_.release_idle();
  return {};
}

}  // namespace cumem
