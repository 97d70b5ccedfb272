// What is reserved where, and what memory is put there?
//
// Addresses are real, so one table serves all machines. Invariants: every mapping
// lies in one reservation; mappings do not overlap; what is not mapped with access
// is PROT_NONE. Guarded by World::mutex.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <vector>

#include "emulator/backing.h"
#include "emulator/driver_api.h"
#include "emulator/machine.h"
#include "emulator/range.h"

namespace cumem::emulator {

// Physical memory of a device. Shared by the handle that names it and the
// mappings that show it; given back when the last of them goes.
struct Physical {
  CUmemGenericAllocationHandle id;
  Device& device;
  CUmemAllocationProp prop;
  Extent extent;
};

// Owns addresses; its destructor unmaps them.
class Addresses {
 public:
  Addresses() = default;
  explicit Addresses(const Range& range) : range_(range) {}
  Addresses(Addresses&& other) noexcept : range_(other.range_) { other.range_ = {}; }
  Addresses& operator=(Addresses&&) = delete;
  ~Addresses();
  const Range& range() const { return range_; }

 private:
  Range range_;
};

enum class Use { kVirtualMemory, kPlain };

struct Reservation {
  Addresses addresses;
  Machine& machine;
  Use use;
};

struct Mapping {
  Range range;
  std::shared_ptr<Physical> physical;
  std::map<CUdevice, CUmemAccess_flags> access;
};

struct Placement {
  std::size_t bytes;
  std::size_t alignment;
  std::uintptr_t hint;
};

enum class Touch { kRead, kWrite };

class AddressSpace {
 public:
  // pre: bytes is a multiple of the granularity, alignment a power of two.
  CUresult reserve(const Placement& placement, Machine& machine, Use use, std::uintptr_t* begin);

  // INVALID_VALUE unless range is exactly one reservation with nothing mapped.
  CUresult release(const Range& range);

  // INVALID_VALUE unless range lies in one reservation and nothing is mapped there.
  CUresult map(const Range& range, std::shared_ptr<Physical> physical);

  // INVALID_VALUE unless range is a gapless row of whole mappings.
  CUresult unmap(const Range& range);

  // The same. Where the kernel refuses half-way, the mappings before have the new
  // access and the others the old one.
  CUresult set_access(const Range& range, const std::vector<CUmemAccessDesc>& wanted);

  // Is range a gapless row of whole mappings?
  bool is_row(const Range& range) const;

  // Can the device touch all of the range?
  bool reachable(const Range& range, CUdevice device, Touch touch) const;

  // Is any of the range reserved?
  bool touches(const Range& range) const;

  const Mapping* mapping_at(std::uintptr_t address) const;
  const Reservation* reservation_at(std::uintptr_t address) const;

  const std::map<std::uintptr_t, Reservation>& reservations() const { return reservations_; }
  const std::map<std::uintptr_t, Mapping>& mappings() const { return mappings_; }

 private:
  std::map<std::uintptr_t, Reservation> reservations_;  // by first address
  std::map<std::uintptr_t, Mapping> mappings_;          // by first address
};

}  // namespace cumem::emulator
