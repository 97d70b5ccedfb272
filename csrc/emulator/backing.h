// Where do the bytes of an emulated device live?
//
// In one memfd for each device, open only while something of it is allocated.
// Offsets only grow, so chunks created one after the other and mapped one after
// the other are one mapping to the kernel (a process may have 65,530). Released
// bytes are punched out of the file, so host memory comes back at once.
#pragma once

#include <cstddef>
#include <cstdint>
#include <mutex>

#include "emulator/driver_api.h"
#include "emulator/range.h"

namespace cumem::emulator {

class Backing;

// Owns bytes of a device's file. Its destructor gives them back.
class Extent {
 public:
  Extent() = default;
  Extent(Extent&& other) noexcept;
  Extent& operator=(Extent&& other) noexcept;
  Extent(const Extent&) = delete;
  Extent& operator=(const Extent&) = delete;
  ~Extent() { reset(); }

  std::size_t bytes() const { return bytes_; }

  // Takes host memory for every byte and fills it with a pattern that depends on
  // the position and the seed and has no zero byte. OUT_OF_MEMORY when the host
  // has no more.
  CUresult fill(std::uint64_t seed);

  // Puts the first range.bytes of the extent at range, without access.
  // pre: range lies in a reservation. On failure the range is as it was.
  CUresult map_at(const Range& range) const;

 private:
  friend class Backing;
  Extent(Backing* backing, std::size_t offset, std::size_t bytes)
      : backing_(backing), offset_(offset), bytes_(bytes) {}
  void reset() noexcept;

  Backing* backing_ = nullptr;
  std::size_t offset_ = 0;
  std::size_t bytes_ = 0;
};

// The memory of one device. Thread-safe; its mutex is a leaf.
class Backing {
 public:
  explicit Backing(std::size_t capacity) : capacity_(capacity) {}
  ~Backing();
  Backing(const Backing&) = delete;
  Backing& operator=(const Backing&) = delete;

  // pre: *extent is empty. OUT_OF_MEMORY when less than `bytes` of the capacity is
  // left; *extent then stays empty.
  CUresult take(std::size_t bytes, Extent* extent);

  std::size_t capacity() const { return capacity_; }
  std::size_t used() const;

 private:
  friend class Extent;
  void give_back(std::size_t offset, std::size_t bytes) noexcept;

  const std::size_t capacity_;
  mutable std::mutex mutex_;
  int file_ = -1;  // open exactly while used_ > 0
  std::size_t next_offset_ = 0;
  std::size_t used_ = 0;
};

// Gives a range of a reservation back to "no memory, no access".
// On failure the range is as it was.
CUresult withdraw(const Range& range) noexcept;

}  // namespace cumem::emulator
