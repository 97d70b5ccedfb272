#include "core/page_mapper.h"

#include <sys/mman.h>

#include <algorithm>

namespace cumem {
namespace {

constexpr std::size_t kThreads = 4;
constexpr std::size_t kBlock = std::size_t{4} << 20;
constexpr int kPopulateRead = 22;  // MADV_POPULATE_READ of Linux 5.14; headers may be older

}  // namespace

// None begins before all are there: the system makes no thread while others map pages.
PageMapper::PageMapper(std::byte* data, std::size_t bytes) : data_(data), bytes_(bytes) {
  std::lock_guard<std::mutex> start(start_);
  for (std::size_t i = 0; i < kThreads; ++i)
    if (!threads_.start([this] { work(); })) break;  // fewer do it, or pinning does
}

PageMapper::~PageMapper() { next_ = bytes_; }

// Advice, so a refusal is the end of it: an older kernel, or a file that was cut short.
void PageMapper::work() noexcept {
  {
    std::lock_guard<std::mutex> start(start_);
  }
  for (std::size_t at = next_.fetch_add(kBlock); at < bytes_; at = next_.fetch_add(kBlock))
    if (madvise(data_ + at, std::min(kBlock, bytes_ - at), kPopulateRead) != 0) return;
}

}  // namespace cumem
