#include "emulator/address_space.h"

#include <sys/mman.h>

#include <algorithm>
#include <iterator>
#include <utility>

namespace cumem::emulator {
namespace {

// The entry whose range contains the address, in a map keyed by first address.
template <class Map, class RangeOf>
auto entry_at(Map& map, std::uintptr_t address, RangeOf range_of) -> decltype(map.begin()) {
  auto next = map.upper_bound(address);
  if (next == map.begin()) return map.end();
  const auto entry = std::prev(next);
  return address < range_of(entry->second).end() ? entry : map.end();
}

Range range_of_mapping(const Mapping& mapping) { return mapping.range; }
Range range_of_reservation(const Reservation& reservation) { return reservation.addresses.range(); }

void* map_nothing(std::uintptr_t hint, std::size_t bytes, int extra_flags) {
  const int flags = MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | extra_flags;
  return mmap(reinterpret_cast<void*>(hint), bytes, PROT_NONE, flags, -1, 0);
}

// Addresses at the hint itself, or an empty owner.
Addresses take_hint(const Placement& placement) {
  if (placement.hint == 0 || placement.hint % placement.alignment != 0) return Addresses();
  void* const got = map_nothing(placement.hint, placement.bytes, MAP_FIXED_NOREPLACE);
  if (got == MAP_FAILED) return Addresses();
  Addresses taken(Range{reinterpret_cast<std::uintptr_t>(got), placement.bytes});
  if (taken.range().begin != placement.hint) return Addresses();  // a kernel before 4.17
  return taken;
}

Addresses take_anywhere(const Placement& placement) {
  const std::size_t bytes = placement.bytes + placement.alignment;
  if (bytes < placement.bytes) return Addresses();
  void* const got = map_nothing(0, bytes, 0);
  if (got == MAP_FAILED) return Addresses();
  const auto start = reinterpret_cast<std::uintptr_t>(got);
  const std::uintptr_t begin = (start + placement.alignment - 1) & ~(placement.alignment - 1);
  const Addresses before(Range{start, begin - start});
  const Addresses after(Range{begin + placement.bytes, start + bytes - begin - placement.bytes});
  return Addresses(Range{begin, placement.bytes});
}

Addresses take(const Placement& placement) {
  Addresses at_hint = take_hint(placement);
  if (at_hint.range().bytes != 0) return at_hint;
  return take_anywhere(placement);
}

int protection(const Mapping& mapping) {
  int bits = PROT_NONE;
  for (const auto& [device, flags] : mapping.access) {
    if (flags != CU_MEM_ACCESS_FLAGS_PROT_NONE) bits |= PROT_READ;
    if (flags == CU_MEM_ACCESS_FLAGS_PROT_READWRITE) bits |= PROT_WRITE;
  }
  return bits;
}

CUresult protect(const Mapping& mapping) {
  void* const address = reinterpret_cast<void*>(mapping.range.begin);
  const bool done = mprotect(address, mapping.range.bytes, protection(mapping)) == 0;
  return done ? CUDA_SUCCESS : CUDA_ERROR_OUT_OF_MEMORY;
}

}  // namespace

Addresses::~Addresses() {
  if (range_.bytes != 0) munmap(reinterpret_cast<void*>(range_.begin), range_.bytes);
}

CUresult AddressSpace::reserve(const Placement& placement, Machine& machine, Use use,
                               std::uintptr_t* begin) {
  Addresses addresses = take(placement);
  if (addresses.range().bytes == 0) return CUDA_ERROR_OUT_OF_MEMORY;
  const std::uintptr_t first = addresses.range().begin;
  madvise(reinterpret_cast<void*>(first), placement.bytes, MADV_DONTFORK);
  reservations_.emplace(first, Reservation{std::move(addresses), machine, use});
  *begin = first;
  return CUDA_SUCCESS;
}

CUresult AddressSpace::release(const Range& range) {
  const auto found = reservations_.find(range.begin);
  if (found == reservations_.end() || !(range_of_reservation(found->second) == range)) {
    return CUDA_ERROR_INVALID_VALUE;
  }
  const auto mapped = mappings_.lower_bound(range.begin);
  if (mapped != mappings_.end() && mapped->first < range.end()) return CUDA_ERROR_INVALID_VALUE;
  reservations_.erase(found);
  return CUDA_SUCCESS;
}

CUresult AddressSpace::map(const Range& range, std::shared_ptr<Physical> physical) {
  const Reservation* const home = reservation_at(range.begin);
  if (home == nullptr || !home->addresses.range().contains(range)) return CUDA_ERROR_INVALID_VALUE;
  const auto next = mappings_.lower_bound(range.begin);
  if (next != mappings_.end() && next->first < range.end()) return CUDA_ERROR_INVALID_VALUE;
  if (mapping_at(range.begin) != nullptr) return CUDA_ERROR_INVALID_VALUE;
  const auto entry = mappings_.emplace(range.begin, Mapping{range, std::move(physical), {}}).first;
  const CUresult mapped = entry->second.physical->extent.map_at(range);
  if (mapped != CUDA_SUCCESS) mappings_.erase(entry);
  return mapped;
}

CUresult AddressSpace::unmap(const Range& range) {
  if (!is_row(range)) return CUDA_ERROR_INVALID_VALUE;
  const CUresult withdrawn = withdraw(range);
  if (withdrawn != CUDA_SUCCESS) return withdrawn;
  mappings_.erase(mappings_.lower_bound(range.begin), mappings_.lower_bound(range.end()));
  return CUDA_SUCCESS;
}

CUresult AddressSpace::set_access(const Range& range, const std::vector<CUmemAccessDesc>& wanted) {
  if (!is_row(range)) return CUDA_ERROR_INVALID_VALUE;
  const auto last = mappings_.lower_bound(range.end());
  for (auto entry = mappings_.lower_bound(range.begin); entry != last; ++entry) {
    Mapping changed = entry->second;
    for (const CUmemAccessDesc& desc : wanted) changed.access[desc.location.id] = desc.flags;
    const CUresult done = protect(changed);
    if (done != CUDA_SUCCESS) return done;
    entry->second = std::move(changed);
  }
  return CUDA_SUCCESS;
}

bool AddressSpace::is_row(const Range& range) const {
  if (range.bytes == 0 || range.wraps()) return false;
  std::uintptr_t reached = range.begin;
  for (auto entry = mappings_.find(reached); entry != mappings_.end() && reached < range.end();
       ++entry) {
    if (entry->first != reached) return false;
    reached = entry->second.range.end();
  }
  return reached == range.end();
}

bool AddressSpace::reachable(const Range& range, CUdevice device, Touch touch) const {
  if (range.wraps()) return false;
  std::uintptr_t reached = range.begin;
  while (reached < range.end()) {
    const Mapping* const mapping = mapping_at(reached);
    if (mapping == nullptr) return false;
    const auto access = mapping->access.find(device);
    if (access == mapping->access.end()) return false;
    if (access->second == CU_MEM_ACCESS_FLAGS_PROT_NONE) return false;
    const bool writable = access->second == CU_MEM_ACCESS_FLAGS_PROT_READWRITE;
    if (touch == Touch::kWrite && !writable) return false;
    reached = mapping->range.end();
  }
  return true;
}

bool AddressSpace::touches(const Range& range) const {
  if (reservation_at(range.begin) != nullptr) return true;
  const auto next = reservations_.lower_bound(range.begin);
  return next != reservations_.end() && next->first < range.end();
}

const Mapping* AddressSpace::mapping_at(std::uintptr_t address) const {
  const auto entry = entry_at(mappings_, address, range_of_mapping);
  return entry == mappings_.end() ? nullptr : &entry->second;
}

const Reservation* AddressSpace::reservation_at(std::uintptr_t address) const {
  const auto entry = entry_at(reservations_, address, range_of_reservation);
  return entry == reservations_.end() ? nullptr : &entry->second;
}

}  // namespace cumem::emulator
