// How does memory of cumem's own live exactly as long as somebody looks at it?
//
// A Memory frees its segment when it goes; a MemoryView holds its Memory and shows
// a part of it to torch, which keeps the view as long as the storage over it. No
// Python code runs when one of them goes: an exception may be pending then.
#pragma once

#include <pybind11/pybind11.h>

#include <cstddef>
#include <memory>

#include "core/allocator.h"

namespace cumem {

class Memory {
 public:
  // Owns the segment that starts at `address`.
  Memory(std::shared_ptr<Allocator> allocator, CUdeviceptr address, std::size_t bytes)
      : allocator_(std::move(allocator)), address_(address), bytes_(bytes) {}
  // Frees the segment, in whatever state, after work that may still use it. In a
  // forked child it is the parent's, and left alone.
  ~Memory();
  Memory(const Memory&) = delete;
  Memory& operator=(const Memory&) = delete;

  CUdeviceptr address() const noexcept { return address_; }
  std::size_t bytes() const noexcept { return bytes_; }

 private:
  const std::shared_ptr<Allocator> allocator_;
  const CUdeviceptr address_;
  const std::size_t bytes_;  // that were asked for
};

void bind_memory(pybind11::module_& m);

}  // namespace cumem
