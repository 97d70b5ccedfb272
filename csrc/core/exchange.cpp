#include "core/exchange.h"

#include <algorithm>

#include "core/arriving.h"

namespace cumem {
namespace {

// How much is saved ahead of the segment that is waited for: enough to keep the
// link busy over a release (measured: under a millisecond), in few bytes.
constexpr std::size_t kAhead = std::size_t{512} << 20;

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
  result.freed_bytes += before - pool_.bytes();
  room_ += before - pool_.bytes();
  return status;
}

// Sees to it that `bytes` can be created, if that is possible now: what nobody wants
// as it is goes back to the driver.
Status Exchange::make_room(std::size_t bytes, SleepResult& result) {
  return bytes + reserve_ <= room_ ? Status{} : give_back(result);
}

// Moves it to the front of those that are not mapped yet.
Segment& Exchange::next_to_arrive() {
  const auto first = arriving_.begin() + static_cast<std::ptrdiff_t>(mapped_.size());
  const std::size_t left = arriving_.size() - mapped_.size();
  const auto last = first + static_cast<std::ptrdiff_t>(std::min(kChoice, left));
  const auto fits = [this](const Segment* one) { return one->bytes_to_create(pool_) == 0; };
  const auto found = pool_.bytes() == 0 ? last : std::find_if(first, last, fits);
  if (found != last) std::rotate(first, found, found + 1);
  return **first;
}

// Maps as many as fit. That the device has less room than we know of (somebody else
// allocates) is no error while something is still to leave.
Status Exchange::bring_in(const WakeRequest& request, SleepResult& result) {
  while (mapped_.size() < arriving_.size()) {
    Segment& next = next_to_arrive();
    const bool last_chance = released_ == leaving_.size();
    const std::size_t fresh = next.bytes_to_create(pool_);
    if (fresh > 0)
      if (Status status = make_room(fresh, result); !status.ok()) return status;
    if (fresh > 0 && fresh + reserve_ > room_ && !last_chance) return {};
    Status status = map_and_restore(next, request.fill, in_, &pool_);
    if (status.ok()) status = wait_and_prove(next, in_, digester_);
    if (status.fault == Fault::device_memory && !last_chance) {
      room_ = 0;
      return {};
    }
    if (!status.ok()) return status;
    room_ -= std::min(room_, fresh);
    mapped_.push_back(&next);
  }
  return {};
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
  const Status filled = in_.wait();
  if (mapped_.size() < arriving_.size()) unmap_all({arriving_[mapped_.size()]});
  if (filled.ok()) return saved;
  unmap_all(mapped_);
  mapped_.clear();
  return filled;
}

}  // namespace cumem
