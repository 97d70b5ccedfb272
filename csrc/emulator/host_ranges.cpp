#include "emulator/host_ranges.h"

#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <iterator>

namespace cumem::emulator {

CUresult HostRanges::add(const Range& range, Context& context) {
  if (first_overlap(range) != nullptr) return CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED;
  registrations_.emplace(range.begin, Registration{range, context});
  return CUDA_SUCCESS;
}

const Registration* HostRanges::starting_at(std::uintptr_t begin) const {
  const auto found = registrations_.find(begin);
  return found == registrations_.end() ? nullptr : &found->second;
}

void HostRanges::remove_all_of(const Context& context) {
  for (auto entry = registrations_.begin(); entry != registrations_.end();) {
    entry = &entry->second.context == &context ? registrations_.erase(entry) : std::next(entry);
  }
}

HostKind HostRanges::kind_of(const Range& range) const {
  const Registration* const overlap = first_overlap(range);
  if (overlap == nullptr) return HostKind::kPageable;
  return overlap->range.contains(range) ? HostKind::kRegistered : HostKind::kStraddling;
}

const Registration* HostRanges::first_overlap(const Range& range) const {
  auto entry = registrations_.upper_bound(range.begin);
  if (entry != registrations_.begin() && std::prev(entry)->second.range.overlaps(range)) {
    return &std::prev(entry)->second;
  }
  const bool overlaps = entry != registrations_.end() && entry->second.range.overlaps(range);
  return overlaps ? &entry->second : nullptr;
}

bool is_host_memory(const Range& range) {
  const auto page = static_cast<std::uintptr_t>(sysconf(_SC_PAGESIZE));
  std::array<unsigned char, 4096> residency;
  const std::size_t step = residency.size() * page;
  for (std::uintptr_t at = range.begin & ~(page - 1); at < range.end(); at += step) {
    const std::size_t bytes = std::min<std::size_t>(step, range.end() - at);
    if (mincore(reinterpret_cast<void*>(at), bytes, residency.data()) != 0) return false;
  }
  return true;
}

}  // namespace cumem::emulator
