#include "core/file_pages.h"

#include <algorithm>

#include "core/host_memory.h"

namespace cumem {

FilePages::Claim::~Claim() {
  if (pages_ == nullptr) return;
  std::lock_guard<std::mutex> lock(pages_->mutex_);
  auto entry = pages_->entries_.find(file_);
  auto& claims = entry->second.claims;
  if (--claims[state_] == 0) claims.erase(state_);
  if (claims.empty()) pages_->entries_.erase(entry);
}

void FilePages::Claim::set(State state) noexcept {
  if (pages_ == nullptr) return;
  std::lock_guard<std::mutex> lock(pages_->mutex_);
  auto& claims = pages_->entries_[file_].claims;
  if (--claims[state_] == 0) claims.erase(state_);
  ++claims[state];
  state_ = state;
}

// A file that one has pinned is pinned, whatever others plan.
std::size_t FilePages::total(State state) const {
  std::size_t bytes = 0;
  for (const auto& [file, entry] : entries_) {
    const bool pinned = entry.claims.count(State::pinned) > 0;
    const bool found = entry.claims.count(state) > 0;
    if (found && (state == State::pinned || !pinned)) bytes += entry.bytes;
  }
  return bytes;
}

std::size_t FilePages::available_without_lock() const {
  const std::size_t free_bytes = available_host_bytes(total(State::pinned));
  return free_bytes - std::min(free_bytes, total(State::planned));
}

std::size_t FilePages::available() const {
  std::lock_guard<std::mutex> lock(mutex_);
  return available_without_lock();
}

Status FilePages::claim(const File& file, Claim& out) {
  if (file.in_memory()) return {};
  std::lock_guard<std::mutex> lock(mutex_);
  const auto known = entries_.find(file.id());
  const bool counts = known != entries_.end() && (known->second.claims.count(State::pinned) > 0 ||
                                                  known->second.claims.count(State::planned) > 0);
  const std::size_t free_bytes = available_without_lock();
  if (!counts && file.bytes() > free_bytes) {
    Status status = failure(Fault::host_memory, "pinning the pages of a file", file.bytes());
    status.free_bytes = free_bytes;
    return status;
  }
  Entry& entry = entries_[file.id()];
  entry.bytes = std::max(entry.bytes, file.bytes());
  ++entry.claims[State::planned];
  out.pages_ = this;
  out.file_ = file.id();
  return {};
}

}  // namespace cumem
