// What does the emulated driver know?
//
// One object holds every table, guarded by one mutex. It is made at the first
// call and never destroyed: threads may run until the very end of the process.
//
// Note [Staying loaded]: worker threads, per-thread state and a fork handler point
// into this library, so it keeps itself loaded: dlclose only drops a reference.
//
// Handles are numbers that are never used twice, given out as pointers: a stale or
// foreign one is always recognised.
#pragma once

#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <list>
#include <map>
#include <memory>
#include <mutex>
#include <vector>

#include "emulator/address_space.h"
#include "emulator/capture.h"
#include "emulator/driver_api.h"
#include "emulator/host_ranges.h"
#include "emulator/machine.h"
#include "emulator/stream.h"

namespace cumem::emulator {

struct Handle {
  std::shared_ptr<Physical> physical;
  std::uint64_t references;
};

// Made by cuModuleLoadData: one kernel, see kernel.h.
struct Module {
  CUmodule id;
  CUfunction digest;
  Context& context;
};

class World {
 public:
  static World& instance();

  std::mutex mutex;
  std::condition_variable changed;  // a task or piece is done, or a context died

  std::vector<std::unique_ptr<Machine>> machines;
  int current = 0;  // a machine index
  bool initialised = false;
  AddressSpace addresses;
  HostRanges hosts;
  std::map<CUmemGenericAllocationHandle, Handle> handles;  // with references left
  std::map<CUcontext, Context*> contexts;
  std::map<CUstream, std::shared_ptr<Stream>> streams;  // not destroyed; legacy ones too
  std::map<CUevent, std::shared_ptr<Event>> events;     // not destroyed
  std::map<CUmodule, Module> modules;                   // not unloaded
  std::vector<std::shared_ptr<Capture>> captures;       // begun and not ended
  std::list<Range> moving;                              // being read or written by a worker

  Machine& add_machine(std::size_t capacity, int devices);
  Machine* machine(int index);
  Device* device(CUdevice value);
  Device* device(int machine, int ordinal);

  // A number never given out before.
  std::uint64_t fresh_number();
  template <class Pointer>
  Pointer fresh_handle() {
    return reinterpret_cast<Pointer>(fresh_number());
  }

  // Takes a context that is no longer active down: waits for its work, then
  // removes its streams, events, modules, plain allocations and registrations.
  void reset(Lock& lock, Context& context);

  // Waits until no worker moves memory in the range.
  void wait_until_still(Lock& lock, const Range& range);

  void kill(Context& context, CUresult code);

 private:
  World();
  std::uint64_t last_number_ = 0;
};

// True in a child of fork: the driver is unusable there.
bool is_forked_child();

// What belongs to the calling thread.
struct ThreadState {
  std::vector<Context*> stack;
  CUstreamCaptureMode capture_mode = CU_STREAM_CAPTURE_MODE_GLOBAL;

  Context* context() const { return stack.empty() ? nullptr : stack.back(); }
};
// Throws when there is no memory for it.
ThreadState& this_thread();

// `stream` as a call gives it: null or CU_STREAM_LEGACY is the legacy stream of
// the context (INVALID_CONTEXT without one), anything unknown INVALID_HANDLE.
CUresult find_stream(World& world, Context* context, CUstream handle,
                     std::shared_ptr<Stream>* stream);

// The module that a function belongs to, or null.
const Module* find_module(const World& world, CUfunction function);

// pre: the context's device is set up. Makes a stream and lists it.
std::shared_ptr<Stream> add_stream(World& world, Context& context, bool blocking);

// The handle is gone afterwards; pending work is still done.
void destroy_stream(World& world, const std::shared_ptr<Stream>& stream);

}  // namespace cumem::emulator
