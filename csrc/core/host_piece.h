// How does a piece of the arena come from the system, and how is it cut up?
#pragma once

#include <cstddef>
#include <map>
#include <memory>

#include "core/driver.h"
#include "core/host_store.h"
#include "core/status.h"

namespace cumem {

// What the host could still give now without reclaiming from others: the
// kernel's estimate, or less where a control group allows less.
std::size_t available_host_bytes();

class HostPiece {
 public:
  // Maps `bytes`, asks for huge pages, touches every page from several threads
  // and pins the piece for all devices. pre: a context is current.
  // On failure `out` is empty and nothing is held.
  static Status make(const Driver& driver, std::size_t bytes, const HostConfig& config,
                     std::unique_ptr<HostPiece>& out);
  ~HostPiece();
  HostPiece(const HostPiece&) = delete;
  HostPiece& operator=(const HostPiece&) = delete;

  // Unpins. On failure the piece must be kept: the driver may still use it.
  Status unpin() noexcept;

  std::size_t bytes() const noexcept { return bytes_; }
  std::size_t free_bytes() const noexcept { return free_bytes_; }
  bool idle() const noexcept { return free_bytes_ == bytes_; }
  bool pinned() const noexcept { return pinned_; }

  // Cuts at most `bytes` off the first free gap; an empty span when full.
  HostSpan cut(std::size_t bytes);
  // Takes back what cut() gave and joins neighbouring gaps.
  void join(const HostSpan& span) noexcept;

 private:
  HostPiece(const Driver& driver, std::byte* data, std::size_t bytes);
  Status pin() noexcept;

  const Driver& driver_;
  std::byte* data_;
  std::size_t bytes_;
  std::size_t free_bytes_;
  bool pinned_ = false;
  std::map<std::size_t, std::size_t> gaps_;  // offset -> bytes
};

}  // namespace cumem
