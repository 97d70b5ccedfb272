// Who runs a stream's work?
#pragma once

#include <memory>

#include "emulator/stream.h"

namespace cumem::emulator {

// Starts the stream's worker, which runs until the queue is empty. The caller holds
// World::mutex and queues work before letting go of it. Throws std::system_error
// when there can be no thread; nothing is changed then.
void start_worker(const std::shared_ptr<Stream>& stream);

}  // namespace cumem::emulator
