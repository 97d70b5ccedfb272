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

// Blocks of a file start where its file system can give a part back.
std::size_t rounded_to_page(std::size_t bytes) noexcept {
  constexpr std::size_t page = 4096;
  return (bytes + page - 1) / page * page;
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
    item.store = plan.store;
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
      const bool same_store = (kept.disk.bytes() > 0) == (item.store == Store::disk);
      if (kept.filled && same_store && same(kept.ranges, item.backup.ranges)) {
        std::swap(kept, item.backup);
        std::swap(kept.reload, item.backup.reload);
      }
      stale.push_back(std::move(kept));
    }
  });
}

Status leave_to_source(Leaving& item, CleanCheck check, Digester* digester) {
  if (!item.segment->source || item.segment->state != SegmentState::awake) return {};
  Source& source = *item.segment->source;
  if (item.store != Store::source || !source.keep) {
    source.stale.assign(source.stale.size(), true);
    return {};
  }
  Reloadable reloadable;
  reloadable.by_digest = check == CleanCheck::digest;
  if (check == CleanCheck::declared) reloadable.declared = item.unchanged;
  return leave_to_source(source, item.backup, reloadable, item.segment->device(), digester);
}

Status take_disk(std::vector<Leaving>& leaving, const std::string& folder) {
  std::size_t bytes = 0;
  for (const Leaving& item : leaving)
    if (item.wants_disk()) bytes += rounded_to_page(total_bytes(item.backup.ranges));
  std::shared_ptr<File> file;
  if (bytes > 0)
    if (Status status = File::create(folder, bytes, file); !status.ok()) return status;
  std::uint64_t offset = 0;
  for (Leaving& item : leaving) {
    if (!item.wants_disk()) continue;
    const std::size_t taken = rounded_to_page(total_bytes(item.backup.ranges));
    item.backup.disk = FileBlock(file, offset, taken);
    offset += taken;
  }
  return {};
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
  result.disk_bytes += status.ok() ? segment.backup.disk.bytes() : 0;
  result.reload_bytes += status.ok() ? total_bytes(segment.backup.reload) : 0;
  if (pool == nullptr) result.freed_bytes += before - segment.mapped_bytes();
  if (status.ok()) result.segments.push_back(segment.address());
  if (!status.ok() && segment.mapped_bytes() == segment.bytes()) stay_awake(segment, transition);
  return status;
}

}  // namespace cumem
