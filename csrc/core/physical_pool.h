// Physical memory that changes hands without going back to the driver.
//
// In a switch, what one segment leaves is what another needs, often to the byte. Handed
// over, it costs neither a release nor a creation, and the driver need not scrub it.
#pragma once

#include <cstddef>
#include <map>
#include <utility>

#include "core/handles.h"
#include "core/status.h"

namespace cumem {

class PhysicalPool {
 public:
  void put(Physical physical, std::size_t bytes) {
    bytes_ += bytes;
    free_.emplace(bytes, std::move(physical));
  }

  // An allocation of exactly `bytes`; empty when there is none.
  Physical take(std::size_t bytes) {
    auto found = free_.find(bytes);
    if (found == free_.end()) return {};
    Physical physical = std::move(found->second);
    free_.erase(found);
    bytes_ -= bytes;
    return physical;
  }

  // How many allocations of exactly `bytes` there are.
  std::size_t count(std::size_t bytes) const { return free_.count(bytes); }
  std::size_t bytes() const noexcept { return bytes_; }

  // Gives everything back to the driver. What it refuses stays, and the call can be
  // repeated; the pool's end then books it.
  Status release() {
    for (auto entry = free_.begin(); entry != free_.end();) {
      if (Status status = entry->second.release(); !status.ok()) return status;
      bytes_ -= entry->first;
      entry = free_.erase(entry);
    }
    return {};
  }

 private:
  std::multimap<std::size_t, Physical> free_;
  std::size_t bytes_ = 0;
};

}  // namespace cumem
