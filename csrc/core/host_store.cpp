#include "core/host_store.h"

#include <algorithm>
#include <atomic>
#include <thread>

#include "core/host_piece.h"
#include "core/processors.h"

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

Status make_ready(const HostSpan& span, const HostStore& store) {
  return span.piece->ready() ? Status{} : span.piece->make_ready(store.config());
}

bool pinned(const HostSpan& span) noexcept { return span.piece->pinned(); }

void HostStore::configure(const HostConfig& config) {
  std::lock_guard<std::mutex> lock(mutex_);
  config_ = config;
}

HostConfig HostStore::config() const {
  std::lock_guard<std::mutex> lock(mutex_);
  return config_;
}

std::size_t HostStore::rounded(std::size_t bytes) noexcept { return round_up(bytes, kAlignment); }

// Memory that is pinned is no place for a backup that is not to be.
bool HostStore::serves(const HostPiece& piece, HostUse use) const {
  if (use == HostUse::slot) return piece.pinned() || piece.use() == HostUse::slot;
  return config_.pin_backups ? piece.pinned() || piece.use() == HostUse::backup
                             : !piece.pinned() && piece.use() == HostUse::backup;
}

std::size_t HostStore::idle_bytes(HostUse use) const {
  std::lock_guard<std::mutex> lock(mutex_);
  std::size_t idle = 0;
  for (const auto& piece : pieces_)
    if (serves(*piece, use)) idle += piece->free_bytes();
  return idle;
}

// With a limit of the user's, the limit decides. Without one, memory that the
// system does not have is refused here: touching it would not fail but have a
// process killed, perhaps this one.
Status HostStore::admit(std::size_t bytes, int device) const {
  const HostUsage now = usage();
  const std::size_t limit = config().limit_bytes;
  const std::size_t left = limit > 0 ? limit - std::min(limit, now.held_bytes) : files_.available();
  if (bytes <= left) return {};
  Status status =
      failure(Fault::host_memory, limit > 0 ? "host memory limit" : "host memory", bytes, device);
  status.free_bytes = left;
  return status;
}

Status HostStore::reserve(std::size_t bytes, const Device& device, HostUse use) {
  if (bytes <= idle_bytes(use)) return {};  // also while another thread makes pages
  std::lock_guard<std::mutex> growth(growth_mutex_);
  const std::size_t idle = idle_bytes(use);
  return bytes <= idle ? Status{} : grow(bytes - idle, device, use);
}

Status HostStore::grow(std::size_t bytes, const Device& device, HostUse use) {
  const std::size_t wanted = round_up(bytes, kPage);
  if (Status status = admit(wanted, device.ordinal()); !status.ok()) return status;
  HostConfig config = this->config();
  config.near = device.processors();
  std::vector<std::unique_ptr<HostPiece>> fresh;
  for (std::size_t taken = 0; taken < wanted;) {
    const std::size_t next = std::min(config.piece_bytes, wanted - taken);
    fresh.push_back(HostPiece::make(driver_, next, use));
    if (!fresh.back()) return failure(Fault::host_memory, "mmap", next, device.ordinal());
    taken += next;
  }
  {
    std::lock_guard<std::mutex> lock(mutex_);
    for (auto& piece : fresh) pieces_.push_back(std::move(piece));
  }
  touch_ahead(config);
  return {};
}

// Page faults are what makes new host memory slow, and they scale with threads
// (measured: 10 GB/s with one, over 50 with sixteen, on huge pages). The threads
// take blocks in order, so that the first piece is ready first. Pieces cannot go
// while they run: whoever removes pieces joins them before.
//
// They leave a quarter of the processors alone. Whoever copies also pins, and both are
// paid for by the same locks and the same memory: with 12 threads on 16 processors a first
// sleep ran at 34 GB/s, with 15 at 25 to 30, with 8 at 26. Threads that helped to pin made
// it slower, as the driver pins for one at a time and copies queue behind it (measured).
void HostStore::touch_ahead(const HostConfig& config) {
  touchers_.join();
  struct Block {
    HostPiece* piece;
    std::size_t index;
  };
  auto blocks = std::make_shared<std::vector<Block>>();
  {
    std::lock_guard<std::mutex> lock(mutex_);
    for (const auto& piece : pieces_) {
      if (piece->ready()) continue;
      for (std::size_t i = 0; i < piece->blocks(); ++i) blocks->push_back({piece.get(), i});
    }
  }
  auto next = std::make_shared<std::atomic<std::size_t>>(0);
  const unsigned most = std::max(1U, std::thread::hardware_concurrency() * 3 / 4);
  const std::size_t wanted = config.touch_threads > 0 ? config.touch_threads : most;
  const auto touch = [blocks, next, near = config.near] {
    if (near) stay_near(*near);
    for (std::size_t at = (*next)++; at < blocks->size(); at = (*next)++)
      (*blocks)[at].piece->touch((*blocks)[at].index);
  };
  for (std::size_t i = 0; i < std::min(wanted, blocks->size()); ++i)
    if (!touchers_.start(touch)) break;  // who copies touches what is left
}

Status HostStore::make_ready() {
  std::lock_guard<std::mutex> growth(growth_mutex_);
  std::vector<HostPiece*> pieces;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    for (const auto& piece : pieces_)
      if (piece->use() == HostUse::backup) pieces.push_back(piece.get());
  }
  const HostConfig config = this->config();
  for (HostPiece* piece : pieces)
    if (Status status = piece->make_ready(config); !status.ok()) return status;
  return {};
}

Status HostStore::prepare(std::size_t bytes, const Device& device) {
  Status status = reserve(bytes, device);
  if (status.fault == Fault::host_memory && release_unfit() > 0) status = reserve(bytes, device);
  return status.ok() ? make_ready() : status;
}

Status HostStore::take(std::size_t bytes, const Device& device, HostBlock& out, HostUse use) {
  out.reset();
  const std::size_t wanted = rounded(bytes);
  if (wanted == 0) return {};
  if (carve(wanted, use, out)) return {};
  if (Status status = reserve(wanted, device, use); !status.ok()) return status;
  if (carve(wanted, use, out)) return {};
  return failure(Fault::host_memory, "host memory", bytes, device.ordinal());
}

bool HostStore::carve(std::size_t bytes, HostUse use, HostBlock& out) {
  HostBlock block;
  std::lock_guard<std::mutex> lock(mutex_);
  std::vector<HostPiece*> fit;
  std::size_t idle = 0;
  for (const auto& piece : pieces_) {
    if (!serves(*piece, use)) continue;
    fit.push_back(piece.get());
    idle += piece->free_bytes();
  }
  if (idle < bytes) return false;
  for (HostPiece* piece : fit) {
    while (block.bytes_ < bytes && piece->free_bytes() > 0) {
      HostSpan span = piece->cut(bytes - block.bytes_);
      span.offset = block.bytes_;
      block.bytes_ += span.bytes;
      block.spans_.push_back(span);
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

template <class Chosen>
std::size_t HostStore::release(const Chosen& chosen) {
  std::vector<std::unique_ptr<HostPiece>> gone;  // unpinned after the mutexes are free
  std::lock_guard<std::mutex> growth(growth_mutex_);
  touchers_.join();
  {
    std::lock_guard<std::mutex> lock(mutex_);
    auto kept = std::stable_partition(pieces_.begin(), pieces_.end(),
                                      [&](const auto& piece) { return !chosen(*piece); });
    std::move(kept, pieces_.end(), std::back_inserter(gone));
    pieces_.erase(kept, pieces_.end());
  }
  std::size_t bytes = 0;
  for (const auto& piece : gone) bytes += piece->bytes();
  return bytes;
}

std::size_t HostStore::release_idle() {
  return release([](const HostPiece& piece) { return piece.idle(); });
}

void HostStore::release_cold() {
  release([](const HostPiece& piece) { return piece.idle() && !piece.ready(); });
}

std::size_t HostStore::release_unfit() {
  return release(
      [this](const HostPiece& piece) { return piece.idle() && !serves(piece, HostUse::backup); });
}

std::vector<std::pair<std::uintptr_t, std::size_t>> HostStore::pieces() const {
  std::lock_guard<std::mutex> lock(mutex_);
  std::vector<std::pair<std::uintptr_t, std::size_t>> places;
  for (const auto& piece : pieces_)
    places.emplace_back(reinterpret_cast<std::uintptr_t>(piece->data()), piece->bytes());
  return places;
}

HostUsage HostStore::usage() const {
  std::lock_guard<std::mutex> lock(mutex_);
  HostUsage usage;
  for (const auto& piece : pieces_) {
    usage.held_bytes += piece->bytes();
    usage.used_bytes += piece->bytes() - piece->free_bytes();
    if (serves(*piece, HostUse::backup)) usage.idle_bytes += piece->free_bytes();
    if (!piece->ready()) continue;
    if (!piece->pinned()) usage.pageable_bytes += piece->bytes();
    usage.touch_seconds += piece->touch_seconds();
    usage.pin_seconds += piece->pin_seconds();
  }
  return usage;
}

}  // namespace cumem
