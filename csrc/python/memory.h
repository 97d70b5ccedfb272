// How does memory of cumem's own live exactly as long as somebody looks at it?
//
// A Memory frees its segment when it goes; a MemoryView holds its Memory and shows
// a part of it to torch, which keeps the view as long as the storage over it. No
// Python code runs when one of them goes: an exception may be pending then.
#pragma once

#include <pybind11/pybind11.h>

#include <algorithm>
#include <cstddef>
#include <memory>

#include "core/allocator.h"

namespace cumem {

class Memory {
 public:
  // Owns the segment that starts at `address`.
  Memory(std::shared_ptr<Allocator> allocator, CUdeviceptr address, const Extent& extent)
      : allocator_(std::move(allocator)), address_(address), extent_(extent) {}
  // Frees the segment, in whatever state, after work that may still use it. In a
  // forked child it is the parent's, and left alone.
  ~Memory();
  Memory(const Memory&) = delete;
  Memory& operator=(const Memory&) = delete;

  CUdeviceptr address() const noexcept { return address_; }
  std::size_t bytes() const noexcept { return extent_.bytes; }
  // How far views may reach; not all of it need be mapped.
  std::size_t capacity() const noexcept { return std::max(extent_.bytes, extent_.capacity); }

 private:
  const std::shared_ptr<Allocator> allocator_;
  const CUdeviceptr address_;
  const Extent extent_;  // that was asked for
};

void bind_memory(pybind11::module_& m);

}  // namespace cumem
