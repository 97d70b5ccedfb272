// Note [Sleep is all or nothing]
//
// Three steps, and only the last one changes anything:
//   1. take every byte of host memory that the plan needs;
//   2. wait for the devices, copy every range, wait for the copies;
//   3. segment by segment: publish "asleep" with its backup, unmap, release.
// A failure in 1 or 2 drops what was taken and leaves everything as it was. The
// driver may refuse an unmap in 3; then this segment is awake if nothing of it was
// unmapped, else asleep with an exact count of mapped bytes and a whole backup;
// the later ones are awake and untouched, and calling again goes on from there.
#include <utility>

#include "core/allocator.h"
#include "core/transition.h"

namespace cumem {
namespace {

struct Leaving {
  Segment* segment = nullptr;
  Backup backup;
};

bool in_order(const Segment& segment, const std::vector<Range>& ranges) {
  CUdeviceptr last = segment.address();
  for (const Range& range : ranges) {
    if (range.address < last || !segment.contains(range)) return false;
    last = range.end();
  }
  return true;
}

// Picks the segments there is something to do for: awake ones, and sleeping
// ones whose memory the driver would not take back last time.
Status select(const SleepRequest& request, Transition& transition, std::vector<Leaving>& leaving) {
  for (const SegmentPlan& plan : request.segments) {
    Segment* segment = transition.take(plan.segment);
    if (segment == nullptr) continue;
    if (segment->state == SegmentState::asleep && segment->handles() == 0) continue;
    if (!in_order(*segment, plan.backup)) {
      Status status = failure(Fault::invalid, "backup ranges", total_bytes(plan.backup));
      status.address = plan.segment;
      return status;
    }
    Leaving item;
    item.segment = segment;
    item.backup.ranges = plan.backup;
    leaving.push_back(std::move(item));
  }
  return {};
}

bool wants_copy(const Leaving& item) {
  return item.segment->state == SegmentState::awake && !item.backup.ranges.empty();
}

Status take_host_memory(HostStore& host, std::vector<Leaving>& leaving) {
  std::size_t bytes = 0;
  for (const Leaving& item : leaving)
    if (wants_copy(item)) bytes += total_bytes(item.backup.ranges);
  for (Leaving& item : leaving) {
    if (!wants_copy(item)) continue;
    const Device& device = item.segment->device();
    ContextGuard context(device);
    if (!context.status().ok()) return context.status();
    if (bytes > 0)
      if (Status status = host.reserve(bytes, device); !status.ok()) return status;
    bytes = 0;  // the first call reserves for all
    Status status = host.take(total_bytes(item.backup.ranges), device, item.backup.host);
    if (!status.ok()) return status;
  }
  return {};
}

Status copy_out(std::vector<Leaving>& leaving, Transfers& transfers) {
  for (Leaving& item : leaving) {
    if (!wants_copy(item)) continue;
    Device& device = item.segment->device();
    ContextGuard context(device);
    if (!context.status().ok()) return context.status();
    if (Status status = transfers.on(device).copy(item.backup); !status.ok()) return status;
  }
  return transfers.wait();
}

// Nothing of it was unmapped, so its contents are where they were.
void stay_awake(Segment& segment, Transition& transition) {
  Backup unused;
  transition.publish([&] {
    segment.state = SegmentState::awake;
    std::swap(unused, segment.backup);
  });
}

Status release(Leaving& item, Transition& transition, SleepResult& result) {
  Segment& segment = *item.segment;
  transition.publish([&] {
    if (segment.state == SegmentState::asleep) return;
    segment.backup = std::move(item.backup);
    segment.state = SegmentState::asleep;
    result.segments.push_back(segment.address());
  });
  ContextGuard context(segment.device());
  if (!context.status().ok()) return context.status();
  const std::size_t before = segment.mapped_bytes();
  Status status = segment.unmap();
  result.freed_bytes += before - segment.mapped_bytes();
  if (!status.ok() && segment.mapped_bytes() == segment.bytes()) stay_awake(segment, transition);
  return status;
}

Status wait_for_devices(const Transition& transition) {
  for (const Device* device : transition.devices())
    if (Status status = device->synchronize(); !status.ok()) return status;
  return {};
}

}  // namespace

Status Allocator::sleep(const SleepRequest& request, SleepResult& result) {
  std::lock_guard<std::mutex> operation(operation_);
  RelaxedCapture relaxed(*driver_);
  drain();
  Transition transition(*this);
  std::vector<Leaving> leaving;
  Transfers transfers(Device::Direction::to_host);  // after what it copies: it waits before the backups go
  Stopwatch watch(result.phases);

  Status status = select(request, transition, leaving);
  if (status.ok()) status = transition.refuse_captures();
  watch.lap("plan");
  if (status.ok()) status = take_host_memory(host_, leaving);
  watch.lap("host_memory");
  if (status.ok()) status = wait_for_devices(transition);
  watch.lap("wait");
  if (status.ok()) status = copy_out(leaving, transfers);
  watch.lap("copy");
  result.copied_bytes = transfers.copied_bytes();
  for (auto item = leaving.begin(); item != leaving.end() && status.ok(); ++item)
    status = release(*item, transition, result);
  watch.lap("release");
  result.pageable_bytes = host_.usage().pageable_bytes;
  return status;
}

}  // namespace cumem
