// What does torch call, and how does a malloc know whose it is?
//
// Torch's pluggable allocator calls two C functions. They carry no pool, so the
// tag comes from the scopes that are open on the calling thread: torch allocates
// from a pool only on a thread that has entered it. This is the one layer with
// process-wide state.
#pragma once

#include <cuda.h>

#include <cstddef>
#include <cstdint>
#include <memory>

#include "core/allocator.h"

namespace cumem::plugin {

// Puts `allocator` behind the two C functions; returns what was there. The old
// one stays reachable for free() while it has live segments.
std::shared_ptr<Allocator> install(std::shared_ptr<Allocator> allocator);
std::shared_ptr<Allocator> current();

// Opens a scope on this thread for one device; the number closes it, from any
// thread and in any order. Closing an unknown number does nothing.
std::uint64_t push_scope(int device, Owner owner);
void pop_scope(std::uint64_t number);

// What a malloc belongs to that comes from a capture into a graph pool with no
// scope of ours on its thread.
void set_graph_owner(Owner owner);

// True in a child of the process that loaded this library, where the driver
// cannot be used.
bool forked() noexcept;

}  // namespace cumem::plugin

extern "C" {

// Returns null when there is no memory; torch turns that into its own error.
__attribute__((visibility("default"))) void* cumem_malloc(std::ptrdiff_t bytes, int device,
                                                          CUstream stream);
// The signature that torch really calls has the device in it.
__attribute__((visibility("default"))) void cumem_free(void* address, std::size_t bytes, int device,
                                                       CUstream stream);
}
