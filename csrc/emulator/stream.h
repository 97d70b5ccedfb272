// When does stream work run?
//
// Later and in order. A stream has a queue; a worker thread runs it, is started
// when work comes and ends when none is left. A task starts when its stream's
// earlier tasks and the tasks it waits for are done, and no sooner than the
// machine's latency after it was submitted. What a task waits for was always
// submitted before it, so that there is no cycle.
//
// Note [Moving memory]: a worker moves memory in pieces without World::mutex. Each
// piece is checked first and noted in World::moving meanwhile; calls that take
// memory away wait for the pieces they overlap (never for the whole task). So a
// caller that unmaps too early is found out at the next piece: the context dies of
// ILLEGAL_ADDRESS, as on a device, and the process does not crash.
#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <memory>
#include <mutex>
#include <vector>

#include "digest/digest.h"
#include "emulator/capture.h"
#include "emulator/driver_api.h"
#include "emulator/machine.h"
#include "emulator/range.h"

namespace cumem::emulator {

using Clock = std::chrono::steady_clock;

// A launch of the digest kernel; see kernel.h.
struct Launch {
  CUfunction function = nullptr;
  std::size_t count = 0;  // of pieces and of digests
  const DigestPiece* pieces = nullptr;
  Digest* digests = nullptr;
};

struct Work {
  enum class Kind { kNothing, kToDevice, kToHost, kFill, kDigest };
  Kind kind = Kind::kNothing;
  Range device;
  std::byte* host = nullptr;
  bool host_is_registered = false;    // then it must still be when a piece is moved
  std::vector<std::byte> staged;      // if not empty, the source instead of `host`
  unsigned char value = 0;            // for kFill
  Launch launch;                      // for kDigest
  std::chrono::microseconds delay{};  // before anything is moved
};

// A point in a stream: reached once its first `tasks` tasks are done.
struct Point {
  std::shared_ptr<Stream> stream;
  std::uint64_t tasks = 0;

  bool reached() const;
};

struct Task {
  Work work;
  std::vector<Point> after;
  Clock::time_point not_before;
};

struct Stream {
  CUstream id;
  Context& context;
  bool blocking;  // ordered with the legacy stream; true for that one too
  bool destroyed = false;
  bool has_worker = false;
  std::uint64_t submitted = 0;
  std::uint64_t completed = 0;
  std::deque<Task> queue;            // submitted - completed tasks
  std::shared_ptr<Capture> capture;  // the one it is part of

  Stream(CUstream handle, Context& owner, bool is_blocking)
      : id(handle), context(owner), blocking(is_blocking) {}
  bool is_legacy() const { return context.legacy.get() == this; }
};

struct Event {
  CUevent id;
  Context& context;
  Point point;                      // an event never recorded is reached
  std::shared_ptr<Capture> inside;  // last recorded in this capture
};

using Lock = std::unique_lock<std::mutex>;  // holds World::mutex

// Queues work. pre: the stream is not capturing. Throws std::system_error or
// std::bad_alloc when it cannot; nothing is queued then.
void submit(const std::shared_ptr<Stream>& stream, Work work, std::vector<Point> after = {});

// The point that work given to the stream up to now must reach; for the legacy
// stream that includes the blocking streams, hence several.
std::vector<Point> everything_on(const std::shared_ptr<Stream>& stream);
std::vector<Point> everything_in(const Context& context);

// Waits, with the lock let go meanwhile. Returns the context's sticky error.
CUresult wait_for(World& world, Lock& lock, const std::vector<Point>& points,
                  const Context& context);

// Unlinks a destroyed stream from its context once its work is done.
void retire(Stream& stream);

}  // namespace cumem::emulator
