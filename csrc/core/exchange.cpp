#include "core/exchange.h"

#include <algorithm>

#include "core/arriving.h"

namespace cumem {
namespace {

// How much is saved ahead of the segment that is waited for, and arrives before the first
// has left: enough to keep the link busy over a release (measured: under a millisecond) or
// the digests of a few GiB, in few bytes.
constexpr std::size_t kAhead = std::size_t{512} << 20;

// How much that fits nobody is held before it goes back to the driver.
constexpr std::size_t kHeld = std::size_t{1} << 30;

// Among how many arriving segments one is looked for that fits what is there. Models
// repeat their sizes from layer to layer, so a few layers hold them all.
constexpr std::size_t kChoice = 64;

// How much released memory is given time to be scrubbed, where there is so much.
constexpr std::size_t kReserve = std::size_t{1} << 30;

}  // namespace

Status Exchange::measure_room() {
  std::size_t total = 0;
  Status status = device_.memory(room_, total);
  reserve_ = std::min(kReserve, room_ / 2);
  return status;
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
  Status status = release(*next.item, transition_, result, &pool_);
  if (!status.ok()) return status;
  ahead_bytes_ -= bytes;
  ++released_;
  return {};
}

Status Exchange::give_back(SleepResult& result) {
  const std::size_t before = pool_.bytes();
  Status status = pool_.release();
  const std::size_t released = before - pool_.bytes();
  result.freed_bytes += released;
  room_ += released;
  returned_ += released;
  return status;
}

// New memory for the start and for what was released.
std::size_t Exchange::budget() const noexcept {
  return kAhead + returned_ - std::min(created_, kAhead + returned_);
}

// While something is to leave, within the budget, unless one alone is larger.
bool Exchange::may_create(std::size_t bytes) const noexcept {
  if (released_ == leaving_.size()) return true;
  return (created_ == 0 || bytes <= budget()) && bytes + reserve_ <= room_;
}

// Moves it to the front of those that are not mapped yet: the first of the next few that
// needs no new memory, or else one that needs little.
Segment& Exchange::next_to_arrive() {
  const auto first = arriving_.begin() + static_cast<std::ptrdiff_t>(mapped_.size());
  const std::size_t left = arriving_.size() - mapped_.size();
  const auto last = first + static_cast<std::ptrdiff_t>(std::min(kChoice, left));
  const auto needs_at_most = [this](std::size_t most) {
    return [this, most](const Segment* one) { return one->bytes_to_create(pool_) <= most; };
  };
  auto found = pool_.bytes() == 0 ? last : std::find_if(first, last, needs_at_most(0));
  if (found == last) found = std::find_if(first, last, needs_at_most(budget()));
  if (found != last) std::rotate(first, found, found + 1);
  return **first;
}

// Maps as many as fit. That the device has less room than we know of (somebody else
// allocates) is no error while something is still to leave.
Status Exchange::bring_in(const WakeRequest& request, SleepResult& result) {
  while (mapped_.size() < arriving_.size()) {
    Segment& next = next_to_arrive();
    const bool last_chance = released_ == leaving_.size();
    std::size_t fresh = next.bytes_to_create(pool_);
    if (fresh > 0 && (last_chance || (pool_.bytes() >= kHeld && !may_create(fresh)))) {
      if (Status status = give_back(result); !status.ok()) return status;
      fresh = next.bytes_to_create(pool_);  // what fitted in part is gone too
    }
    if (fresh > 0 && !may_create(fresh)) break;
    Status status = map_and_restore(next, request.fill, in_, &pool_);
    if (status.ok()) status = wait_and_prove(next, in_, digester_);
    if (status.fault == Fault::device_memory && !last_chance) {
      room_ = 0;
      break;
    }
    if (!status.ok()) return status;
    room_ -= std::min(room_, fresh);
    created_ += fresh;
    mapped_.push_back(&next);
  }
  return send();
}

Status Exchange::send() {
  Status status = in_.submit();
  if (status.ok()) sent_ = mapped_.size();
  return status;
}

Status Exchange::run(const WakeRequest& request, SleepResult& result) {
  Stopwatch watch(result.phases);
  Status status = measure_room();
  if (status.ok()) status = bring_in(request, result);
  watch.lap("map_and_submit");
  while (status.ok() && (released_ < leaving_.size() || mapped_.size() < arriving_.size())) {
    status = save_ahead();
    watch.lap("save");
    if (status.ok() && released_ < leaving_.size()) status = release_next(result);
    watch.lap("release");
    if (status.ok()) status = bring_in(request, result);
    watch.lap("map_and_submit");
  }
  const Status given = give_back(result);  // while the last copies run
  watch.lap("release");
  const Status settled = settle();
  watch.lap("copy");
  if (!status.ok()) return status;
  return settled.ok() ? given : settled;
}

// Whatever happened: what is mapped and filled has arrived, what is half-way is
// given back, and nothing is left running.
Status Exchange::settle() {
  const Status saved = out_.wait();
  (void)send();  // where it fails, run() knows
  const Status filled = in_.stop();
  if (!filled.ok()) sent_ = 0;
  unmap_all({arriving_.begin() + static_cast<std::ptrdiff_t>(sent_),
             arriving_.begin() +
                 static_cast<std::ptrdiff_t>(std::min(mapped_.size() + 1, arriving_.size()))});
  mapped_.resize(sent_);
  return filled.ok() ? saved : filled;
}

}  // namespace cumem
