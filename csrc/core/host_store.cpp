#include "core/host_store.h"

#include <algorithm>

#include "core/host_piece.h"

namespace cumem {
namespace {

// Blocks start at multiples of this, so that no copy starts inside a bus line.
constexpr std::size_t kAlignment = 256;
constexpr std::size_t kPage = 4096;

std::size_t round_up(std::size_t bytes, std::size_t step) noexcept {
  return (bytes + step - 1) / step * step;
}

}  // namespace

HostBlock& HostBlock::operator=(HostBlock&& other) noexcept {
  std::swap(store_, other.store_);
  std::swap(spans_, other.spans_);
  std::swap(bytes_, other.bytes_);
  return *this;
}

void HostBlock::reset() noexcept {
  if (store_ != nullptr) store_->put_back(spans_);
  store_ = nullptr;
  spans_.clear();
  bytes_ = 0;
}

HostStore::HostStore(const Driver& driver, HostConfig config) : driver_(driver), config_(config) {}

HostStore::~HostStore() = default;

void HostStore::configure(const HostConfig& config) {
  std::lock_guard<std::mutex> lock(mutex_);
  config_ = config;
}

HostConfig HostStore::config() const {
  std::lock_guard<std::mutex> lock(mutex_);
  return config_;
}

std::size_t HostStore::idle_bytes() const {
  std::lock_guard<std::mutex> lock(mutex_);
  std::size_t idle = 0;
  for (const auto& piece : pieces_) idle += piece->free_bytes();
  return idle;
}

// With a limit of the user's, the limit decides. Without one, memory that the
// system does not have is refused here: touching it would not fail but have a
// process killed, perhaps this one.
Status HostStore::admit(std::size_t bytes, int device) const {
  const HostUsage now = usage();
  const std::size_t limit = config().limit_bytes;
  const std::size_t left =
      limit > 0 ? limit - std::min(limit, now.held_bytes) : available_host_bytes();
  if (bytes <= left) return {};
  Status status =
      failure(Fault::host_memory, limit > 0 ? "host memory limit" : "host memory", bytes, device);
  status.free_bytes = left;
  return status;
}

Status HostStore::reserve(std::size_t bytes, const Device& device) {
  std::lock_guard<std::mutex> growth(growth_mutex_);
  const std::size_t idle = idle_bytes();
  return bytes <= idle ? Status{} : grow(bytes - idle, device);
}

Status HostStore::grow(std::size_t bytes, const Device& device) {
  const std::size_t wanted = round_up(bytes, kPage);
  if (Status status = admit(wanted, device.ordinal()); !status.ok()) return status;
  const HostConfig config = this->config();
  std::vector<std::unique_ptr<HostPiece>> fresh;
  for (std::size_t taken = 0; taken < wanted;) {
    const std::size_t next = std::min(config.piece_bytes, wanted - taken);
    std::unique_ptr<HostPiece> piece;
    if (Status status = HostPiece::make(driver_, next, config, piece); !status.ok()) return status;
    fresh.push_back(std::move(piece));
    taken += next;
  }
  std::lock_guard<std::mutex> lock(mutex_);
  for (auto& piece : fresh) pieces_.push_back(std::move(piece));
  return {};
}

Status HostStore::take(std::size_t bytes, const Device& device, HostBlock& out) {
  out.reset();
  const std::size_t wanted = round_up(bytes, kAlignment);
  if (wanted == 0) return {};
  if (carve(wanted, out)) return {};
  if (Status status = reserve(wanted, device); !status.ok()) return status;
  if (carve(wanted, out)) return {};
  return failure(Fault::host_memory, "host memory", bytes, device.ordinal());
}

bool HostStore::carve(std::size_t bytes, HostBlock& out) {
  HostBlock block;
  std::lock_guard<std::mutex> lock(mutex_);
  std::size_t idle = 0;
  for (const auto& piece : pieces_) idle += piece->free_bytes();
  if (idle < bytes) return false;
  for (const auto& piece : pieces_) {
    while (block.bytes_ < bytes && piece->free_bytes() > 0) {
      block.spans_.push_back(piece->cut(bytes - block.bytes_));
      block.bytes_ += block.spans_.back().bytes;
    }
  }
  block.store_ = this;
  out = std::move(block);
  return true;
}

void HostStore::put_back(const std::vector<HostSpan>& spans) noexcept {
  std::lock_guard<std::mutex> lock(mutex_);
  for (const HostSpan& span : spans) span.piece->join(span);
}

std::size_t HostStore::release_idle() {
  std::vector<std::unique_ptr<HostPiece>> idle;  // unpinned after the mutex is free
  std::lock_guard<std::mutex> growth(growth_mutex_);
  {
    std::lock_guard<std::mutex> lock(mutex_);
    auto used = std::partition(pieces_.begin(), pieces_.end(),
                               [](const auto& piece) { return !piece->idle(); });
    std::move(used, pieces_.end(), std::back_inserter(idle));
    pieces_.erase(used, pieces_.end());
  }
  std::size_t bytes = 0;
  for (const auto& piece : idle) bytes += piece->bytes();
  return bytes;
}

HostUsage HostStore::usage() const {
  std::lock_guard<std::mutex> lock(mutex_);
  HostUsage usage;
  for (const auto& piece : pieces_) {
    usage.held_bytes += piece->bytes();
    usage.used_bytes += piece->bytes() - piece->free_bytes();
    if (!piece->pinned()) usage.pageable_bytes += piece->bytes();
  }
  return usage;
}

}  // namespace cumem
