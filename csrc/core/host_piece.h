// How does a piece of the arena come from the system, and how is it cut up?
#pragma once

#include <atomic>
#include <cstddef>
#include <map>
#include <memory>
#include <mutex>
#include <vector>

#include "core/driver.h"
#include "core/host_store.h"
#include "core/pin.h"
#include "core/status.h"

namespace cumem {

// A piece is cold when it is made (addresses only), and ready when its pages are
// there and pinned. Threads may touch pieces ahead of the one that needs them.
class HostPiece {
 public:
  // Maps addresses and asks for huge pages. Null when the system has none.
  static std::unique_ptr<HostPiece> make(const Driver& driver, std::size_t bytes, HostUse use);
  ~HostPiece();
  HostPiece(const HostPiece&) = delete;
  HostPiece& operator=(const HostPiece&) = delete;

  // Touches the nth of blocks() blocks, once. Any thread may call it, for any block.
  void touch(std::size_t block) noexcept;
  std::size_t blocks() const noexcept;
  // Waits for pages that other threads touch, touches what nobody does, and pins where
  // that is wanted, once. pre: a context is current. A piece that the driver
  // will not pin is ready as pageable memory, unless the configuration or its use forbids
  // it: then every call fails and the piece is of no use.
  Status make_ready(const HostConfig& config);
  // Unpins. On failure the pages must stay: the driver may still use them.
  Status unpin() noexcept;

  std::byte* data() const noexcept { return data_; }
  std::size_t bytes() const noexcept { return bytes_; }
  bool ready() const noexcept { return ready_; }
  // How long make_ready() waited for pages, and how long pinning took; seconds.
  double touch_seconds() const noexcept { return touch_seconds_; }
  double pin_seconds() const noexcept { return pin_seconds_; }
  bool pinned() const noexcept { return pinned_; }
  HostUse use() const noexcept { return use_; }  // what it was made for

  // Gaps; guarded by the store's mutex.
  std::size_t free_bytes() const noexcept { return free_bytes_; }
  bool idle() const noexcept { return free_bytes_ == bytes_; }
  // Cuts at most `bytes` off the first free gap; an empty span when full.
  HostSpan cut(std::size_t bytes);
  // Takes back what cut() gave and joins neighbouring gaps.
  void join(const HostSpan& span) noexcept;

 private:
  HostPiece(const Driver& driver, std::byte* data, std::size_t bytes, HostUse use);

  const Driver& driver_;
  Pin pin_;  // given back before the pages
  std::byte* data_;
  std::size_t bytes_;
  const HostUse use_;
  std::size_t free_bytes_;
  std::mutex commit_mutex_;                 // held while pages are pinned
  std::vector<std::atomic<bool>> claimed_;  // a block that some thread touches or has touched
  std::atomic<std::size_t> touched_{0};     // blocks that are done
  double touch_seconds_ = 0;
  double pin_seconds_ = 0;
  std::atomic<bool> ready_{false};  // set after the two above
  std::atomic<bool> pinned_{false};
  std::map<std::size_t, std::size_t> gaps_;  // offset -> bytes
};

}  // namespace cumem
