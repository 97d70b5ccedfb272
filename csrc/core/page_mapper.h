// How are the pages of a mapped file there before they are pinned?
//
// Pinning maps what is not mapped yet: page by page, with one thread, and from a disk with one
// read at a time. A few threads that go ahead take that from it: 8 GiB of a tmpfs were pinned and
// copied in 353 and 399 ms with four of them, in 506 and 626 with none, in 462 to 471 with eight
// or twelve (measured). Where pages are large, as in the page cache of most disks, it costs little.
#pragma once

#include <atomic>
#include <cstddef>
#include <mutex>

#include "core/threads.h"

namespace cumem {

class PageMapper {
 public:
  // Begins at `data` and returns. The mapping outlives the mapper; none of it need be readable.
  PageMapper(std::byte* data, std::size_t bytes);
  ~PageMapper();  // stops; nothing is undone
  PageMapper(const PageMapper&) = delete;
  PageMapper& operator=(const PageMapper&) = delete;

 private:
  void work() noexcept;

  std::byte* const data_;
  const std::size_t bytes_;
  std::atomic<std::size_t> next_{0};  // what no thread has taken yet begins here
  std::mutex start_;
  Threads threads_;  // goes first
};

}  // namespace cumem
