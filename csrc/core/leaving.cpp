#include "core/leaving.h"

#include <algorithm>
#include <utility>

#include "core/transfer.h"

namespace cumem {
namespace {

bool same(const std::vector<Range>& left, const std::vector<Range>& right) noexcept {
  return std::equal(
      left.begin(), left.end(), right.begin(), right.end(),
      [](const Range& a, const Range& b) { return a.address == b.address && a.bytes == b.bytes; });
}

bool in_order(const Segment& segment, const std::vector<Range>& ranges) {
  CUdeviceptr last = segment.address();
  for (const Range& range : ranges) {
    if (range.address < last || !segment.contains(range)) return false;
    last = range.end();
  }
  return true;
}

// Nothing of it was unmapped, so its contents are where they were.
void stay_awake(Segment& segment, Transition& transition) {
  Backup unused;
  transition.publish([&] {
    segment.state = SegmentState::awake;
    std::swap(unused, segment.backup);
  });
}

}  // namespace

Status select_leaving(const SleepRequest& request, Transition& transition,
                      std::vector<Leaving>& leaving) {
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
    item.unchanged = plan.unchanged;
    leaving.push_back(std::move(item));
  }
  return {};
}

void take_kept_backups(std::vector<Leaving>& leaving, Transition& transition) {
  std::vector<Backup> stale;
  transition.publish([&] {
    for (Leaving& item : leaving) {
      if (item.segment->state != SegmentState::awake) continue;
      Backup kept = std::exchange(item.segment->backup, Backup{});
      if (kept.filled && same(kept.ranges, item.backup.ranges)) std::swap(kept, item.backup);
      stale.push_back(std::move(kept));
    }
  });
}

Status release(Leaving& item, Transition& transition, SleepResult& result, PhysicalPool* pool) {
  Segment& segment = *item.segment;
  ContextGuard context(segment.device());
  if (!context.status().ok()) return context.status();
  transition.publish([&] {
    if (segment.state == SegmentState::asleep) return;  // it goes on from an earlier try
    item.backup.filled = true;
    segment.backup = std::move(item.backup);
    segment.state = SegmentState::asleep;
  });
  const std::size_t before = segment.mapped_bytes();
  Status status = segment.unmap(pool);
  if (pool == nullptr) result.freed_bytes += before - segment.mapped_bytes();
  if (status.ok()) result.segments.push_back(segment.address());
  if (!status.ok() && segment.mapped_bytes() == segment.bytes()) stay_awake(segment, transition);
  return status;
}

}  // namespace cumem
