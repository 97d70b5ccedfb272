// Where do backups live?
//
// In one arena of host memory, taken from the system in pieces of exact size
// and pinned for every device. A HostBlock is a list of spans in those pieces;
// it gives its bytes back to the arena when it goes. The arena keeps idle pieces
// for the next cycle until release_idle().
//
// Note [Cold pieces]: taking memory is cheap; making its pages is not. A block may
// lie in pieces that are still cold. Threads of the store touch them in order, and
// whoever copies calls make_ready() on each span's piece first, so that new memory,
// its pinning and the copies overlap.
//
// Note [Pinned or pageable]: a piece that the driver refuses to pin is kept as
// pageable memory where the configuration allows it, and every piece is where the
// configuration does not want backups pinned. Copies then pass through pinned slots
// (staging.h) and the report says so; nothing else changes. The slots' memory is of the
// arena too: it must be pinned, or is not taken.
#pragma once

#include <sched.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <iterator>
#include <memory>
#include <mutex>
#include <utility>
#include <vector>

#include "core/device.h"
#include "core/driver.h"
#include "core/file_pages.h"
#include "core/status.h"
#include "core/threads.h"

namespace cumem {

struct HostConfig {
  std::size_t limit_bytes = 0;  // 0: no limit of our own, admission by available memory
  std::size_t piece_bytes = std::size_t{256} << 20;
  bool pin_backups = true;
  bool allow_pageable = true;             // where pinning is refused
  bool retain = true;                     // keep pieces between cycles
  unsigned touch_threads = 0;             // 0: three quarters of the processors
  std::shared_ptr<const cpu_set_t> near;  // where to touch; null: anywhere
};

class HostStore;
class HostPiece;

// What a block is for.
enum class HostUse : std::uint8_t {
  backup,  // pinned or not, as the configuration says
  slot,    // pinned, or of no use
};

struct HostSpan {
  std::byte* data = nullptr;
  std::size_t bytes = 0;
  HostPiece* piece = nullptr;
  std::size_t offset = 0;  // in its block
};

// Owns spans of the arena, in the order they are to be filled.
class HostBlock {
 public:
  HostBlock() = default;
  HostBlock(HostBlock&& other) noexcept { *this = std::move(other); }
  HostBlock& operator=(HostBlock&& other) noexcept;
  ~HostBlock() { reset(); }
  void reset() noexcept;

  const std::vector<HostSpan>& spans() const noexcept { return spans_; }
  std::size_t bytes() const noexcept { return bytes_; }

  // Calls visit(data, bytes) -> Status for each contiguous part of
  // [offset, offset + bytes), after its piece was made ready. pre: the range lies
  // in the block; a context is current.
  template <class Visit>
  Status visit(std::size_t offset, std::size_t bytes, const Visit& visit) const;
  // The same, with the part as a span.
  template <class Visit>
  Status visit_spans(std::size_t offset, std::size_t bytes, const Visit& visit) const;

 private:
  friend class HostStore;
  HostStore* store_ = nullptr;
  std::vector<HostSpan> spans_;
  std::size_t bytes_ = 0;
};

struct HostUsage {
  std::size_t held_bytes = 0;      // taken from the system
  std::size_t used_bytes = 0;      // of those, in backups now
  std::size_t idle_bytes = 0;      // of those, there for new backups; others are slots, or unfit
  std::size_t pageable_bytes = 0;  // of those held, not pinned
  double touch_seconds = 0;        // that copies waited for pages of these pieces
  double pin_seconds = 0;          // that pinning them took
};

class HostStore {
 public:
  HostStore(const Driver& driver, HostConfig config);
  ~HostStore();
  HostStore(const HostStore&) = delete;
  HostStore& operator=(const HostStore&) = delete;

  // Sees to it that take() finds `bytes`, and starts to make their pages.
  // On failure the arena holds no more than before.
  Status reserve(std::size_t bytes, const Device& device, HostUse use = HostUse::backup);

  // Makes every piece for backups ready. pre: a context is current.
  Status make_ready();
  // Both; what prepare() does. What no backup may use goes before it fails.
  Status prepare(std::size_t bytes, const Device& device);

  // A block of exactly `bytes`, from memory the arena holds or can get.
  // On failure `out` is empty and the arena holds no more than before.
  Status take(std::size_t bytes, const Device& device, HostBlock& out,
              HostUse use = HostUse::backup);

  // Gives every piece that no block uses back to the system; returns the bytes.
  std::size_t release_idle();
  // The same for pieces that never became ready (the driver would not pin them).
  void release_cold();
  // The same for pieces that no backup may use; returns the bytes.
  std::size_t release_unfit();

  // What a block of `bytes` takes of the arena.
  static std::size_t rounded(std::size_t bytes) noexcept;

  HostUsage usage() const;
  // Address and bytes of each piece.
  std::vector<std::pair<std::uintptr_t, std::size_t>> pieces() const;
  void configure(const HostConfig& config);
  HostConfig config() const;
  const Driver& driver() const noexcept { return driver_; }
  // What lies beside the arena.
  FilePages& files() noexcept { return files_; }

 private:
  friend class HostBlock;
  void put_back(const std::vector<HostSpan>& spans) noexcept;
  bool serves(const HostPiece& piece, HostUse use) const;  // pre: mutex_ is held
  std::size_t idle_bytes(HostUse use) const;
  Status admit(std::size_t bytes, int device) const;
  Status grow(std::size_t bytes, const Device& device, HostUse use);
  void touch_ahead(const HostConfig& config);  // pre: growth_mutex_ is held
  template <class Chosen>
  std::size_t release(const Chosen& chosen);
  bool carve(std::size_t bytes, HostUse use, HostBlock& out);

  const Driver& driver_;
  FilePages files_;
  // Growth takes seconds and is done by one thread at a time, under its own
  // mutex and never under `mutex_`, which guards the fields below.
  std::mutex growth_mutex_;
  mutable std::mutex mutex_;
  HostConfig config_;
  std::vector<std::unique_ptr<HostPiece>> pieces_;
  Threads touchers_;  // of pieces, so it goes first; guarded by growth_mutex_
};

// Makes the piece of a span ready; see HostPiece::make_ready.
Status make_ready(const HostSpan& span, const HostStore& store);
// Is it pinned? pre: its piece is ready.
bool pinned(const HostSpan& span) noexcept;

template <class Visit>
Status HostBlock::visit(std::size_t offset, std::size_t bytes, const Visit& visit) const {
  return visit_spans(offset, bytes,
                     [&visit](const HostSpan& part) { return visit(part.data, part.bytes); });
}

template <class Visit>
Status HostBlock::visit_spans(std::size_t offset, std::size_t bytes, const Visit& visit) const {
  // The last span that starts at or before `offset`.
  auto span = std::prev(std::upper_bound(
      spans_.begin(), spans_.end(), offset,
      [](std::size_t value, const HostSpan& candidate) { return value < candidate.offset; }));
  while (bytes > 0) {
    const std::size_t skipped = offset - span->offset;
    const std::size_t step = std::min(bytes, span->bytes - skipped);
    Status status = make_ready(*span, *store_);
    if (status.ok()) status = visit(HostSpan{span->data + skipped, step, span->piece, offset});
    if (!status.ok()) return status;
    offset += step;
    bytes -= step;
    ++span;
  }
  return {};
}

}  // namespace cumem
