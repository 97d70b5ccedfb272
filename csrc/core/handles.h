// Who owns what the driver gives?
//
// Three move-only owners. A Mapping lives at addresses of a Reservation and
// shows a Physical; whoever holds all three declares them in the order
// Reservation, Physical, Mapping, so that destruction unmaps, then releases,
// then frees the addresses.
//
// release() is for callers that must know whether it worked: when the driver
// refuses, the owner still owns and release() can be called again. A destructor
// that is refused books the refusal in the driver's Ledger and lets go: what
// the driver would not take back is never touched again.
#pragma once

#include <cuda.h>

#include <cstddef>
#include <utility>

#include "core/driver.h"
#include "core/status.h"

namespace cumem {

// Owns a range of addresses: cuMemAddressReserve .. cuMemAddressFree.
class Reservation {
 public:
  Reservation() = default;
  Reservation(Reservation&& other) noexcept { swap(other); }
  Reservation& operator=(Reservation&& other) noexcept;
  ~Reservation();

  // pre: bytes is a multiple of the granularity; *this is empty.
  // On failure *this stays empty and nothing is reserved.
  Status create(const Driver& driver, std::size_t bytes, std::size_t alignment) noexcept;
  Status release() noexcept;

  CUdeviceptr address() const noexcept { return address_; }
  std::size_t bytes() const noexcept { return bytes_; }

 private:
  void swap(Reservation& other) noexcept;
  const Driver* driver_ = nullptr;
  CUdeviceptr address_ = 0;
  std::size_t bytes_ = 0;
};

// Owns physical memory: cuMemCreate .. cuMemRelease.
class Physical {
 public:
  Physical() = default;
  Physical(Physical&& other) noexcept { swap(other); }
  Physical& operator=(Physical&& other) noexcept;
  ~Physical();

  // pre: bytes is a multiple of the granularity; *this is empty.
  // On failure *this stays empty and nothing is allocated. `device` is the
  // ordinal that a failing Status names.
  Status create(const Driver& driver, std::size_t bytes, const CUmemAllocationProp& prop,
                int device) noexcept;
  Status release() noexcept;

  bool empty() const noexcept { return driver_ == nullptr; }
  CUmemGenericAllocationHandle handle() const noexcept { return handle_; }

 private:
  void swap(Physical& other) noexcept;
  const Driver* driver_ = nullptr;
  CUmemGenericAllocationHandle handle_ = 0;
  std::size_t bytes_ = 0;
  int device_ = -1;
};

// Owns the fact that memory is visible at addresses: cuMemMap .. cuMemUnmap.
class Mapping {
 public:
  Mapping() = default;
  Mapping(Mapping&& other) noexcept { swap(other); }
  Mapping& operator=(Mapping&& other) noexcept;
  ~Mapping();

  // pre: [address, address + bytes) lies in a live Reservation with nothing
  // mapped there; physical has at least `bytes`; *this is empty.
  // The mapping cannot be accessed until cuMemSetAccess. On failure *this stays
  // empty and nothing is mapped.
  Status create(const Driver& driver, CUdeviceptr address, std::size_t bytes,
                const Physical& physical, int device) noexcept;
  Status release() noexcept;
  // The same for neighbours in address order, in one call. On failure all own as before.
  // pre: `first` and the count - 1 after it own mappings without a gap between them.
  static Status release_row(Mapping* const* first, std::size_t count) noexcept;

  bool empty() const noexcept { return driver_ == nullptr; }

 private:
  void swap(Mapping& other) noexcept;
  const Driver* driver_ = nullptr;
  CUdeviceptr address_ = 0;
  std::size_t bytes_ = 0;
  int device_ = -1;
};

}  // namespace cumem
