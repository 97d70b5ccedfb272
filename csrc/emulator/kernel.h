// What does the one kernel of the emulated driver do?
//
// cumem_digest of cumem/digest.cu: block i computes the digest of piece i. A device
// finds out about bad addresses when the kernel runs, and so does this.
#pragma once

#include "emulator/stream.h"
#include "emulator/world.h"

namespace cumem::emulator {

constexpr unsigned kDigestThreads = 512;  // a block, as the kernel is written for

// Runs a launch with the mutex held, and let go while memory is read. The context
// dies of what a device would die of: memory that cannot be touched, an address
// that is not a multiple of 16, or a module that is gone.
void run_digest(World& world, Lock& lock, Context& context, const Launch& launch);

}  // namespace cumem::emulator
