// How is device memory made, and plain device memory given back?
//
// Plain memory (cuMemAlloc) is a reservation, physical memory and a mapping with
// access, in one; the calls of virtual memory refuse it.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>

#include "emulator/call.h"
#include "emulator/driver_api.h"

namespace cumem::emulator {

struct PhysicalRequest {
  CUmemAllocationProp prop;
  std::size_t bytes;  // a multiple of the granularity
};

// Takes and fills memory of the device; the mutex is let go meanwhile. On failure
// *made is unchanged and nothing is taken.
CUresult create_physical(Session& session, Device& device, const PhysicalRequest& request,
                         std::shared_ptr<Physical>* made);

// The same, put at new addresses that the device can reach.
CUresult allocate_plain(Session& session, Device& device, std::size_t bytes, std::uintptr_t* begin);

// INVALID_VALUE unless plain memory starts there.
CUresult free_plain(World& world, std::uintptr_t begin);

}  // namespace cumem::emulator
