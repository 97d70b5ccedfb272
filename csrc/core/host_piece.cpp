#include "core/host_piece.h"

#include <sys/mman.h>

#include <algorithm>
#include <chrono>
#include <thread>
#include <utility>

namespace cumem {
namespace {

constexpr std::size_t kPage = 4096;
constexpr std::size_t kHugePage = std::size_t{2} << 20;
constexpr std::size_t kBlock = 2 * kHugePage;  // what one thread touches at a time

// Maps `bytes` at an address that huge pages can start at. Null on failure.
std::byte* map_aligned(std::size_t bytes) noexcept {
  const std::size_t room = bytes + kHugePage;
  void* raw = mmap(nullptr, room, PROT_READ | PROT_WRITE,
                   MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (raw == MAP_FAILED) return nullptr;
  auto* begin = static_cast<std::byte*>(raw);
  const auto value = reinterpret_cast<std::uintptr_t>(raw);
  const std::size_t lead = (kHugePage - value % kHugePage) % kHugePage;
  if (lead > 0) munmap(begin, lead);
  if (room - lead > bytes) munmap(begin + lead + bytes, room - lead - bytes);
  return begin + lead;
}

void touch_pages(std::byte* data, std::size_t bytes) noexcept {
  for (std::size_t offset = 0; offset < bytes; offset += kPage)
    *const_cast<volatile std::byte*>(data + offset) = std::byte{0};
}

}  // namespace

HostPiece::HostPiece(const Driver& driver, std::byte* data, std::size_t bytes, HostUse use)
    : driver_(driver),
      data_(data),
      bytes_(bytes),
      use_(use),
      free_bytes_(bytes),
      claimed_((bytes + kBlock - 1) / kBlock) {
  gaps_.emplace(0, bytes);
}

std::unique_ptr<HostPiece> HostPiece::make(const Driver& driver, std::size_t bytes, HostUse use) {
  std::byte* data = map_aligned(bytes);
  if (data == nullptr) return nullptr;
  // Advice only: the kernel may have huge pages switched off.
  madvise(data, bytes, MADV_HUGEPAGE);
  // Pinned pages must not be copied or shared by a fork.
  madvise(data, bytes, MADV_DONTFORK);
  return std::unique_ptr<HostPiece>(new HostPiece(driver, data, bytes, use));
}

std::size_t HostPiece::blocks() const noexcept { return claimed_.size(); }

void HostPiece::touch(std::size_t block) noexcept {
  if (claimed_[block].exchange(true)) return;
  const std::size_t offset = block * kBlock;
  touch_pages(data_ + offset, std::min(kBlock, bytes_ - offset));
  ++touched_;
}

Status HostPiece::make_ready(const HostConfig& config) {
  if (ready_) return {};
  std::lock_guard<std::mutex> lock(commit_mutex_);
  if (ready_) return {};
  const auto started = std::chrono::steady_clock::now();
  for (std::size_t block = 0; block < blocks(); ++block) touch(block);
  // The last blocks are in other threads' hands for less than a millisecond.
  while (touched_ < blocks()) std::this_thread::yield();
  const auto touched = std::chrono::steady_clock::now();
  const bool must = use_ == HostUse::slot;
  Status status = must || config.pin_backups ? pin_.take(driver_, data_, bytes_) : Status{};
  pinned_ = pin_.held();
  if (!status.ok() && (must || !config.allow_pageable)) return status;
  touch_seconds_ = std::chrono::duration<double>(touched - started).count();
  pin_seconds_ = std::chrono::duration<double>(std::chrono::steady_clock::now() - touched).count();
  ready_ = true;
  return {};
}

Status HostPiece::unpin() noexcept {
  Status status = pin_.release();
  pinned_ = pin_.held();
  return status;
}

// What is still pinned stays, lest the device write elsewhere.
HostPiece::~HostPiece() {
  if (unpin().ok()) munmap(data_, bytes_);
}

HostSpan HostPiece::cut(std::size_t bytes) {
  if (gaps_.empty()) return {};
  auto gap = gaps_.begin();
  const std::size_t offset = gap->first;
  const std::size_t taken = std::min(bytes, gap->second);
  const std::size_t left = gap->second - taken;
  gaps_.erase(gap);
  if (left > 0) gaps_.emplace(offset + taken, left);
  free_bytes_ -= taken;
  return {data_ + offset, taken, this};
}

void HostPiece::join(const HostSpan& span) noexcept {
  auto offset = static_cast<std::size_t>(span.data - data_);
  std::size_t bytes = span.bytes;
  free_bytes_ += bytes;
  auto next = gaps_.lower_bound(offset);
  if (next != gaps_.end() && next->first == offset + bytes) {
    bytes += next->second;
    next = gaps_.erase(next);
  }
  if (next != gaps_.begin()) {
    auto previous = std::prev(next);
    if (previous->first + previous->second == offset) {
      previous->second += bytes;
      return;
    }
  }
  gaps_.emplace(offset, bytes);
}

}  // namespace cumem
