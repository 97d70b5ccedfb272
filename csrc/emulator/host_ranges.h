// Which host memory is registered?
//
// Addresses are the process's, so one table serves all machines. Ranges do not
// overlap. Guarded by World::mutex.
#pragma once

#include <cstdint>
#include <map>

#include "emulator/driver_api.h"
#include "emulator/machine.h"
#include "emulator/range.h"

namespace cumem::emulator {

// How a piece of host memory lies to the registered ranges. The driver refuses
// to copy what straddles the edge of one.
enum class HostKind { kPageable, kRegistered, kStraddling };

struct Registration {
  Range range;
  Context& context;
};

class HostRanges {
 public:
  // HOST_MEMORY_ALREADY_REGISTERED when any of it is.
  CUresult add(const Range& range, Context& context);

  // The registration that starts there, or null.
  const Registration* starting_at(std::uintptr_t begin) const;

  // pre: starting_at(begin) != nullptr.
  void remove(std::uintptr_t begin) { registrations_.erase(begin); }
  void remove_all_of(const Context& context);

  HostKind kind_of(const Range& range) const;
  const std::map<std::uintptr_t, Registration>& all() const { return registrations_; }

 private:
  const Registration* first_overlap(const Range& range) const;

  std::map<std::uintptr_t, Registration> registrations_;  // by first address
};

// Is there memory of this process at every page of the range?
bool is_host_memory(const Range& range);

}  // namespace cumem::emulator
