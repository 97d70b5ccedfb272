#include "core/exchange.h"

#include <algorithm>

#include "core/arriving.h"

namespace cumem {
namespace {

// How much is saved ahead of the segment that is waited for: enough to keep the
// link busy over a release (measured: under a millisecond), in few bytes.
constexpr std::size_t kAhead = std::size_t{512} << 20;

}  // namespace

Status Exchange::measure_room() {
  std::size_t total = 0;
  return device_.memory(room_, total);
}

Status Exchange::save_ahead() {
  while (submitted_ < leaving_.size() && (ahead_bytes_ == 0 || ahead_bytes_ < kAhead)) {
    Departure& next = leaving_[submitted_];
    if (next.item->wants_copy()) {
      Status status = saver_.save(next.item->backup, next.item->unchanged);
      if (status.ok()) status = saver_.finish();
      if (status.ok()) status = out_.mark(next.saved);
      if (!status.ok()) return status;
      next.submitted = true;
    }
    ahead_bytes_ += next.item->segment->bytes();
    ++submitted_;
  }
  return {};
}

Status Exchange::release_next(SleepResult& result) {
  Departure& next = leaving_[released_];
  if (next.submitted)
    if (Status status = next.saved.wait(); !status.ok()) return status;
  const std::size_t bytes = next.item->segment->bytes();
  if (Status status = release(*next.item, transition_, result); !status.ok()) return status;
  ahead_bytes_ -= bytes;
  room_ += bytes;
  ++released_;
  return {};
}

// Maps as many as fit. That the device has less room than we know of (somebody else
// allocates) is no error while something is still to leave.
Status Exchange::bring_in(const WakeRequest& request) {
  while (mapped_.size() < arriving_.size()) {
    Segment& next = *arriving_[mapped_.size()];
    const bool last_chance = released_ == leaving_.size();
    if (next.bytes() > room_ && !last_chance) return {};
    Status status = map_and_restore(next, request.fill, in_);
    if (status.fault == Fault::device_memory && !last_chance) {
      room_ = 0;
      return {};
    }
    if (!status.ok()) return status;
    room_ -= std::min(room_, next.bytes());
    mapped_.push_back(&next);
  }
  return {};
}

Status Exchange::run(const WakeRequest& request, SleepResult& result) {
  Status status = measure_room();
  while (status.ok() && (released_ < leaving_.size() || mapped_.size() < arriving_.size())) {
    status = save_ahead();
    if (status.ok()) status = bring_in(request);
    if (status.ok() && released_ < leaving_.size()) status = release_next(result);
  }
  const Status settled = settle();
  return status.ok() ? settled : status;
}

// Whatever happened: what is mapped and filled has arrived, what is half-way is
// given back, and nothing is left running.
Status Exchange::settle() {
  const Status saved = out_.wait();
  const Status filled = in_.wait();
  if (!filled.ok()) unmap_all(mapped_);
  const bool half = mapped_.size() < arriving_.size() && arriving_[mapped_.size()]->handles() > 0;
  if (half) unmap_all({arriving_[mapped_.size()]});
  return filled.ok() ? saved : filled;
}

}  // namespace cumem
