// Where do backups live?
//
// In one arena of host memory, taken from the system in pieces of exact size
// and pinned for every device. A HostBlock is a list of spans in those pieces;
// it gives its bytes back to the arena when it goes. The arena keeps idle pieces
// for the next cycle until release_idle().
//
// Note [Pinned or pageable]: a piece that the driver refuses to pin is kept as
// pageable memory where the configuration allows it. Copies are then slower and
// the report says so; nothing else changes.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <utility>
#include <vector>

#include "core/device.h"
#include "core/driver.h"
#include "core/status.h"

namespace cumem {

struct HostConfig {
  std::size_t limit_bytes = 0;  // 0: no limit of our own, admission by available memory
  std::size_t piece_bytes = std::size_t{256} << 20;
  bool allow_pageable = true;
  bool retain = true;          // keep pieces between cycles
  unsigned touch_threads = 0;  // 0: by the number of processors
};

class HostStore;
class HostPiece;

struct HostSpan {
  std::byte* data = nullptr;
  std::size_t bytes = 0;
  HostPiece* piece = nullptr;
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

 private:
  friend class HostStore;
  HostStore* store_ = nullptr;
  std::vector<HostSpan> spans_;
  std::size_t bytes_ = 0;
};

struct HostUsage {
  std::size_t held_bytes = 0;      // taken from the system
  std::size_t used_bytes = 0;      // of those, in backups now
  std::size_t pageable_bytes = 0;  // of those held, not pinned
};

class HostStore {
 public:
  HostStore(const Driver& driver, HostConfig config);
  ~HostStore();
  HostStore(const HostStore&) = delete;
  HostStore& operator=(const HostStore&) = delete;

  // Takes `bytes` for the arena's later blocks, so that take() cannot fail for
  // want of memory. pre: `device`'s context is current.
  // On failure the arena holds no more than before.
  Status reserve(std::size_t bytes, const Device& device);

  // A block of exactly `bytes`, from memory the arena holds or can get.
  // On failure `out` is empty and the arena holds no more than before.
  Status take(std::size_t bytes, const Device& device, HostBlock& out);

  // Gives every piece that no block uses back to the system; returns the bytes.
  std::size_t release_idle();

  HostUsage usage() const;
  void configure(const HostConfig& config);
  HostConfig config() const;

 private:
  friend class HostBlock;
  void put_back(const std::vector<HostSpan>& spans) noexcept;
  std::size_t idle_bytes() const;
  Status admit(std::size_t bytes, int device) const;
  Status grow(std::size_t bytes, const Device& device);
  bool carve(std::size_t bytes, HostBlock& out);

  const Driver& driver_;
  // Growth takes seconds and is done by one thread at a time, under its own
  // mutex and never under `mutex_`, which guards the fields below.
  std::mutex growth_mutex_;
  mutable std::mutex mutex_;
  HostConfig config_;
  std::vector<std::unique_ptr<HostPiece>> pieces_;
};

}  // namespace cumem
