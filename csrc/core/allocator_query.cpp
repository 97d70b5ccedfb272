// What the registry says, and whether the driver agrees.
#include <algorithm>
#include <set>

#include "core/allocator.h"
#include "core/transfer.h"

namespace cumem {
namespace {

SegmentInfo describe(const Segment& segment) {
  SegmentInfo info;
  info.address = segment.address();
  info.bytes = segment.bytes();
  info.asked_bytes = segment.asked_bytes;
  info.backup_bytes = total_bytes(segment.backup.ranges);
  if (segment.source && segment.source->mapped)
    info.pinned_file_bytes = segment.source->mapped->pinned_bytes();
  info.device = segment.device().ordinal();
  info.state = segment.state;
  info.owner = segment.owner;
  info.serial = segment.serial;
  // While an operation works on it, the chunks are the operation's.
  const bool awake = segment.state == SegmentState::awake;
  info.mapped_bytes =
      segment.in_transition ? (awake ? segment.bytes() : 0) : segment.mapped_bytes();
  info.mapped_chunks = segment.in_transition ? 0 : segment.mapped_chunks();
  info.handles = segment.in_transition ? 0 : segment.handles();
  return info;
}

Status disagreement(const char* what, const Segment& segment, std::size_t bytes) {
  Status status = failure(Fault::integrity, what, bytes, segment.device().ordinal());
  status.address = segment.address();
  return status;
}

Status verify_segment(const Segment& segment) {
  const bool awake = segment.state == SegmentState::awake;
  if (awake && segment.mapped_bytes() != segment.bytes())
    return disagreement("mapped bytes of an awake segment", segment, segment.mapped_bytes());
  const std::size_t wanted = total_bytes(segment.backup.ranges);
  if (segment.backup.host.bytes() + segment.backup.disk.bytes() < wanted)
    return disagreement("bytes of a backup", segment, wanted);
  return segment.verify();
}

}  // namespace

const Segment* Allocator::around(CUdeviceptr address) const {
  auto next = segments_.upper_bound(address);
  if (next == segments_.begin()) return nullptr;
  const Segment* segment = std::prev(next)->second.get();
  return segment->contains(address) ? segment : nullptr;
}

bool Allocator::owns(CUdeviceptr address) const {
  std::lock_guard<std::mutex> lock(mutex_);
  return around(address) != nullptr;
}

bool Allocator::is_awake(CUdeviceptr address, std::size_t bytes) const {
  std::lock_guard<std::mutex> lock(mutex_);
  const CUdeviceptr end = address + std::max<std::size_t>(bytes, 1);
  while (address < end) {
    const Segment* segment = around(address);
    if (segment == nullptr || segment->state != SegmentState::awake) return false;
    address = segment->address() + segment->bytes();
  }
  return true;
}

std::optional<Owner> Allocator::owner_of(CUdeviceptr address) const {
  std::lock_guard<std::mutex> lock(mutex_);
  const Segment* segment = around(address);
  if (segment == nullptr) return std::nullopt;
  return segment->owner;
}

void Allocator::assign(CUdeviceptr address, const Owner& owner) {
  std::lock_guard<std::mutex> lock(mutex_);
  auto found = segments_.find(address);
  if (found != segments_.end()) found->second->owner = owner;
}

std::vector<SegmentInfo> Allocator::segments() const {
  std::lock_guard<std::mutex> lock(mutex_);
  std::vector<SegmentInfo> infos;
  infos.reserve(segments_.size());
  for (const auto& [address, segment] : segments_) infos.push_back(describe(*segment));
  return infos;
}

// The files are held, so that they can be read without the lock.
std::set<std::string> Allocator::changed_sources(const std::vector<CUdeviceptr>& segments) const {
  std::set<std::shared_ptr<const File>> files;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    for (const CUdeviceptr address : segments) {
      const auto found = segments_.find(address);
      if (found == segments_.end()) continue;
      const Segment& segment = *found->second;
      if (segment.state == SegmentState::awake && segment.source && segment.source->keep)
        files.insert(segment.source->file);
    }
  }
  std::set<std::string> changed;
  for (const std::shared_ptr<const File>& file : files)
    if (!file->prove().ok()) changed.insert(*file->shared_path());
  return changed;
}

std::vector<std::uint64_t> Allocator::sleeping_pools() const {
  std::lock_guard<std::mutex> lock(mutex_);
  std::set<std::uint64_t> pools;
  for (const auto& [address, segment] : segments_)
    if (segment->state == SegmentState::asleep) pools.insert(segment->owner.pool);
  return {pools.begin(), pools.end()};
}

FreeCounters Allocator::counters() const {
  std::lock_guard<std::mutex> lock(mutex_);
  FreeCounters counters = counters_;
  counters.waiting = deferred_.size();
  counters.quarantined = quarantine_.size();
  for (const auto& segment : quarantine_) counters.quarantined_bytes += segment->bytes();
  return counters;
}

std::size_t Allocator::live_segments() const {
  std::lock_guard<std::mutex> lock(mutex_);
  return segments_.size() + quarantine_.size();
}

Status Allocator::verify() {
  std::lock_guard<std::mutex> operation(operation_);
  RelaxedCapture relaxed(*driver_);
  // Held during driver queries, against the rule: a free must not end a segment
  // between the two answers that are compared. These calls do not wait.
  std::lock_guard<std::mutex> lock(mutex_);
  for (const auto& [address, segment] : segments_) {
    ContextGuard context(segment->device());
    if (!context.status().ok()) return context.status();
    if (Status status = verify_segment(*segment); !status.ok()) return status;
  }
  return verify_ledger();
}

// A malloc or free on another thread may be between the driver and the registry;
// then there is nothing to compare.
Status Allocator::verify_ledger() const {
  if (unpublished_ > 0) return {};
  const Ledger& ledger = driver_->ledger();
  std::size_t handles = 0;
  for (const auto& [address, segment] : segments_) handles += segment->handles();
  for (const auto& segment : quarantine_) handles += segment->handles();
  const std::uint64_t live = ledger.handles_created - ledger.handles_released;
  if (live == handles + ledger.refused_handles) return {};
  return failure(Fault::integrity, "physical allocations in the ledger", live);
}

}  // namespace cumem
