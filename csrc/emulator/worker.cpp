#include "emulator/worker.h"

#include <pthread.h>
#include <signal.h>

#include <algorithm>
#include <cstring>
#include <exception>
#include <thread>
#include <utility>

#include "emulator/kernel.h"
#include "emulator/moving.h"
#include "emulator/world.h"

namespace cumem::emulator {
namespace {

constexpr std::size_t kPiece = std::size_t{1} << 20;

// New threads inherit the mask: the process's signals go to its own threads. Faults
// stay with the thread that makes them.
class SignalsBlocked {
 public:
  SignalsBlocked() {
    sigset_t all;
    sigfillset(&all);
    for (const int fault : {SIGSEGV, SIGBUS, SIGILL, SIGFPE}) sigdelset(&all, fault);
    pthread_sigmask(SIG_SETMASK, &all, &before_);
  }
  ~SignalsBlocked() { pthread_sigmask(SIG_SETMASK, &before_, nullptr); }
  SignalsBlocked(const SignalsBlocked&) = delete;
  SignalsBlocked& operator=(const SignalsBlocked&) = delete;

 private:
  sigset_t before_;
};

bool ready(const Task& task) {
  return std::all_of(task.after.begin(), task.after.end(),
                     [](const Point& point) { return point.reached(); });
}

struct Piece {
  Range device;
  Range host;  // empty for a fill
  std::size_t offset;
};

Piece piece_of(const Work& work, std::size_t offset) {
  const std::size_t bytes = std::min(kPiece, work.device.bytes - offset);
  Piece piece{{work.device.begin + offset, bytes}, {}, offset};
  const std::byte* const host = work.staged.empty() ? work.host : work.staged.data();
  if (work.kind != Work::Kind::kFill) {
    piece.host = {reinterpret_cast<std::uintptr_t>(host) + offset, bytes};
  }
  return piece;
}

bool is_sound(const World& world, const Context& context, const Work& work, const Piece& piece) {
  const Touch touch = work.kind == Work::Kind::kToHost ? Touch::kRead : Touch::kWrite;
  if (!world.addresses.reachable(piece.device, context.device.value(), touch)) return false;
  return !work.host_is_registered || world.hosts.kind_of(piece.host) == HostKind::kRegistered;
}

void move_bytes(const Work& work, const Piece& piece) {
  void* const device = reinterpret_cast<void*>(piece.device.begin);
  void* const host = reinterpret_cast<void*>(piece.host.begin);
  switch (work.kind) {
    case Work::Kind::kToDevice:
      std::memcpy(device, host, piece.device.bytes);
      break;
    case Work::Kind::kToHost:
      std::memcpy(host, device, piece.device.bytes);
      break;
    case Work::Kind::kFill:
      std::memset(device, work.value, piece.device.bytes);
      break;
    case Work::Kind::kNothing:
    case Work::Kind::kDigest:
      break;
  }
}

void move_all(World& world, Lock& lock, Context& context, const Work& work) {
  const Clock::time_point start = Clock::now();
  for (std::size_t done = 0; done < work.device.bytes;) {
    const Piece piece = piece_of(work, done);
    if (!is_sound(world, context, work, piece)) {
      return world.kill(context, CUDA_ERROR_ILLEGAL_ADDRESS);
    }
    {
      const Moving moving(world, lock, piece.device, piece.host);
      move_bytes(work, piece);
    }
    done += piece.device.bytes;
    const std::uint64_t bandwidth = context.device.machine.bandwidth;
    if (!sleep_until(world, lock, context, start + time_for(done, bandwidth))) return;
  }
}

void perform(World& world, Lock& lock, Context& context, const Work& work) {
  if (!sleep_until(world, lock, context, Clock::now() + work.delay)) return;
  if (work.kind == Work::Kind::kDigest) return run_digest(world, lock, context, work.launch);
  move_all(world, lock, context, work);
}

void wait_until_ready(World& world, Lock& lock, const Context& context, const Task& task) {
  world.changed.wait(lock, [&] { return context.dead() || ready(task); });
  sleep_until(world, lock, context, task.not_before);
}

void run_front(World& world, Lock& lock, Stream& stream) {
  Context& context = stream.context;
  try {
    wait_until_ready(world, lock, context, stream.queue.front());
    if (!context.dead()) perform(world, lock, context, stream.queue.front().work);
  } catch (const std::exception&) {
    world.kill(context, CUDA_ERROR_UNKNOWN);
  }
  stream.queue.pop_front();
  ++stream.completed;
  world.changed.notify_all();
}

void run(const std::shared_ptr<Stream>& stream) {
  World& world = World::instance();
  Lock lock(world.mutex);
  while (!stream->queue.empty()) run_front(world, lock, *stream);
  stream->has_worker = false;
  retire(*stream);
}

}  // namespace

void start_worker(const std::shared_ptr<Stream>& stream) {
  const SignalsBlocked blocked;
  std::thread([stream] { run(stream); }).detach();
  stream->has_worker = true;
}

}  // namespace cumem::emulator
