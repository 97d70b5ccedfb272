// Which slots does the ring of a Staging have?
#include <algorithm>
#include <utility>

#include "core/staging.h"

namespace cumem {
namespace {

constexpr std::size_t kSmallest = std::size_t{64} << 10;  // a slot where memory is short
constexpr std::size_t kSlotsEach = 2;                     // one is filled, one is copied

}  // namespace

// As many slots as the ring allows and the work can use.
Staging::Want Staging::want(const std::vector<FilePart>& parts) const {
  const FileConfig& config = means_.config;
  const std::size_t bytes = total_bytes(parts);
  const std::size_t step = std::min(config.buffer_bytes, std::max(bytes, kSmallest));
  const std::size_t most = std::max<std::size_t>(1, config.ring_bytes / step);
  return {step, std::min(most, (bytes + step - 1) / step)};
}

bool Staging::enough(const Want& want) const noexcept {
  return step_bytes_ >= want.step && slots_.size() >= want.count;
}

// Slots for files: pinned or not, as backups are; but where those are not by choice, pinned
// if that can be.
Status Staging::prepare(const std::vector<FilePart>& parts) {
  if (!means_.host.config().pin_backups) {
    bool ready = false;
    Status status = pin_slots(parts, ready);
    if (ready || !status.ok()) return status;
  }
  const Want want = this->want(parts);
  if (enough(want)) return {};
  Status status = let_go();
  return status.ok() ? renew(want, HostUse::backup) : status;
}

// A refusal is asked for once: each attempt makes pages.
Status Staging::pin_slots(const std::vector<FilePart>& parts, bool& ready) {
  const Want want = this->want(parts);
  ready = use_ == HostUse::slot && (refused_ ? !slots_.empty() : enough(want));
  if (ready || refused_) return {};
  if (Status status = let_go(); !status.ok()) return status;
  ready = renew(want, HostUse::slot).ok();
  refused_ = slots_.size() < want.count;
  return {};
}

Status Staging::let_go() {
  for (Slot& slot : slots_)
    if (Status status = wait(slot); !status.ok()) return status;
  slots_.clear();
  return {};
}

// Smaller slots, and few, where the host has no room after what only saves time has gone.
Status Staging::renew(const Want& want, HostUse use) {
  use_ = use;
  Status status = take(want.step, want.count, use);
  if (status.fault == Fault::host_memory && means_.make_room())
    status = take(want.step, want.count, use);
  for (std::size_t smaller = want.step / 2;
       status.fault == Fault::host_memory && smaller >= kSmallest; smaller /= 2)
    status = take(smaller, std::min<std::size_t>(want.count, kSlotsEach), use);
  return status;
}

Status Staging::take(std::size_t bytes, std::size_t count, HostUse use) {
  step_bytes_ = bytes;
  // One admission and one growth for all; where that fails a few will do. What must be pinned
  // grows slot by slot instead, so that a refusal leaves those before it.
  const std::size_t all = count * HostStore::rounded(bytes);
  if (use == HostUse::backup && !means_.host.reserve(all, device_).ok())
    count = std::min(count, kSlotsEach);
  for (std::size_t i = 0; i < count; ++i)
    if (Status status = take_slot(bytes, use); !status.ok())
      return slots_.empty() ? status : Status{};
  return {};
}

Status Staging::take_slot(std::size_t bytes, HostUse use) {
  Slot slot;
  Status status = means_.host.take(bytes, device_, slot.block, use);
  if (status.ok() && use == HostUse::slot)
    status = slot.block.visit(0, bytes, [](std::byte*, std::size_t) { return Status{}; });
  if (status.ok()) {
    slots_.push_back(std::move(slot));
  } else if (use == HostUse::slot) {
    slot.block.reset();
    means_.host.release_cold();
  }
  return status;
}

}  // namespace cumem
