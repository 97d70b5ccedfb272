#include "emulator/backing.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <utility>
#include <vector>

namespace cumem::emulator {
namespace {

constexpr std::size_t kFillWords = (std::size_t{256} << 10) / sizeof(std::uint64_t);
constexpr std::uint64_t kOddMultiplier = 0x9E3779B97F4A7C15u;
constexpr std::uint64_t kNoZeroByte = 0x0101010101010101u;

void make_pattern(std::vector<std::uint64_t>& words, std::uint64_t seed, std::uint64_t first) {
  const std::uint64_t start = seed * kOddMultiplier;
  for (std::size_t i = 0; i < words.size(); ++i) {
    words[i] = (start ^ ((first + i) * kOddMultiplier)) | kNoZeroByte;
  }
}

bool write_all(int file, const std::uint64_t* words, std::size_t bytes, std::size_t offset) {
  auto* data = reinterpret_cast<const char*>(words);
  while (bytes > 0) {
    const ssize_t done = pwrite(file, data, bytes, static_cast<off_t>(offset));
    if (done < 0 && errno == EINTR) continue;
    if (done <= 0) return false;
    data += done;
    offset += static_cast<std::size_t>(done);
    bytes -= static_cast<std::size_t>(done);
  }
  return true;
}

}  // namespace

Extent::Extent(Extent&& other) noexcept
    : backing_(std::exchange(other.backing_, nullptr)),
      offset_(other.offset_),
      bytes_(std::exchange(other.bytes_, 0)) {}

Extent& Extent::operator=(Extent&& other) noexcept {
  if (this != &other) {
    reset();
    backing_ = std::exchange(other.backing_, nullptr);
    offset_ = other.offset_;
    bytes_ = std::exchange(other.bytes_, 0);
  }
  return *this;
}

void Extent::reset() noexcept {
  if (backing_ != nullptr) std::exchange(backing_, nullptr)->give_back(offset_, bytes_);
}

CUresult Extent::fill(std::uint64_t seed) {
  std::vector<std::uint64_t> words(kFillWords);
  const std::size_t step = words.size() * sizeof(std::uint64_t);
  for (std::size_t done = 0; done < bytes_; done += step) {
    make_pattern(words, seed, done / sizeof(std::uint64_t));
    const std::size_t bytes = std::min(step, bytes_ - done);
    if (!write_all(backing_->file_, words.data(), bytes, offset_ + done)) {
      return CUDA_ERROR_OUT_OF_MEMORY;
    }
  }
  return CUDA_SUCCESS;
}

CUresult Extent::map_at(const Range& range) const {
  void* const address = reinterpret_cast<void*>(range.begin);
  const int flags = MAP_SHARED | MAP_FIXED;
  void* const got =
      mmap(address, range.bytes, PROT_NONE, flags, backing_->file_, static_cast<off_t>(offset_));
  if (got == MAP_FAILED) return CUDA_ERROR_OUT_OF_MEMORY;
  madvise(address, range.bytes, MADV_DONTFORK);
  return CUDA_SUCCESS;
}

Backing::~Backing() {
  if (file_ >= 0) close(file_);
}

CUresult Backing::take(std::size_t bytes, Extent* extent) {
  std::lock_guard<std::mutex> lock(mutex_);
  if (bytes > capacity_ - used_) return CUDA_ERROR_OUT_OF_MEMORY;
  if (file_ < 0) {
    file_ = memfd_create("cumem_emulated_device", MFD_CLOEXEC);
    if (file_ < 0) return CUDA_ERROR_OPERATING_SYSTEM;
    next_offset_ = 0;
  }
  const auto end = static_cast<off_t>(next_offset_ + bytes);
  if (ftruncate(file_, end) != 0) {
    if (used_ == 0) close(std::exchange(file_, -1));
    return CUDA_ERROR_OUT_OF_MEMORY;
  }
  *extent = Extent(this, std::exchange(next_offset_, next_offset_ + bytes), bytes);
  used_ += bytes;
  return CUDA_SUCCESS;
}

std::size_t Backing::used() const {
  std::lock_guard<std::mutex> lock(mutex_);
  return used_;
}

void Backing::give_back(std::size_t offset, std::size_t bytes) noexcept {
  std::lock_guard<std::mutex> lock(mutex_);
  fallocate(file_, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, static_cast<off_t>(offset),
            static_cast<off_t>(bytes));
  used_ -= bytes;
  if (used_ == 0) close(std::exchange(file_, -1));
}

CUresult withdraw(const Range& range) noexcept {
  void* const address = reinterpret_cast<void*>(range.begin);
  const int flags = MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED;
  if (mmap(address, range.bytes, PROT_NONE, flags, -1, 0) == MAP_FAILED) {
    return CUDA_ERROR_OUT_OF_MEMORY;
  }
  madvise(address, range.bytes, MADV_DONTFORK);
  return CUDA_SUCCESS;
}

}  // namespace cumem::emulator
