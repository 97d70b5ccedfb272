// What happens before every driver call?
//
// guarded() is the one way in: it finds the machine that the call speaks to, counts
// the call, lets an injected failure fire before any effect, and checks what every
// call of that kind must check. The body then runs under World::mutex.
#pragma once

#include <cstdint>
#include <new>
#include <system_error>

#include "emulator/driver_api.h"
#include "emulator/world.h"

namespace cumem::emulator {

// Which object tells the machine: if the object is unknown, the current context
// does, and without one the current machine.
struct Subject {
  enum class Kind {
    kProcess,
    kContext,
    kDevice,
    kContextHandle,
    kStream,
    kEvent,
    kHandle,
    kAddress
  };
  Kind kind;
  std::uint64_t value = 0;

  static Subject process() { return {Kind::kProcess}; }  // the current machine, always
  static Subject context() { return {Kind::kContext}; }
  static Subject device(CUdevice value) {
    return {Kind::kDevice, static_cast<std::uint64_t>(value)};
  }
  static Subject context(CUcontext id) { return {Kind::kContextHandle, bits(id)}; }
  static Subject stream(CUstream id) { return {Kind::kStream, bits(id)}; }
  static Subject event(CUevent id) { return {Kind::kEvent, bits(id)}; }
  static Subject handle(CUmemGenericAllocationHandle id) { return {Kind::kHandle, id}; }
  static Subject address(CUdeviceptr pointer) { return {Kind::kAddress, pointer}; }

 private:
  static std::uint64_t bits(const void* pointer) {
    return reinterpret_cast<std::uintptr_t>(pointer);
  }
};

enum Rule : unsigned {
  kAnytime = 0,
  kInitialised = 1,  // else NOT_INITIALIZED
  kCurrent = 2,      // a context is current, else INVALID_CONTEXT
  kAlive = 4,        // the device's context, or the current one, is not dead
  kUnsafe = 8,       // potentially unsafe during a capture
  kQuery = kInitialised,
  kMemory = kInitialised | kAlive | kUnsafe,
  kOnObject = kInitialised | kAlive,
  kUnderContext = kInitialised | kCurrent | kAlive,
};

struct Call {
  const char* name;  // unversioned
  Subject subject;
  unsigned rules;
};

struct Session {
  World& world;
  Lock lock;
  Machine* machine = nullptr;
  Context* context = nullptr;  // current for this thread, or null
};

// Everything up to the body. CUDA_SUCCESS: go on.
CUresult admit(Session& session, const Call& call);

template <class Body>
CUresult guarded(const Call& call, Body body) noexcept try {
  if (is_forked_child()) return CUDA_ERROR_NOT_INITIALIZED;
  World& world = World::instance();
  Session session{world, Lock(world.mutex)};
  const CUresult refused = admit(session, call);
  return refused == CUDA_SUCCESS ? body(session) : refused;
} catch (const std::bad_alloc&) {
  return CUDA_ERROR_OUT_OF_MEMORY;
} catch (const std::system_error&) {
  return CUDA_ERROR_OPERATING_SYSTEM;
} catch (...) {
  return CUDA_ERROR_UNKNOWN;
}

}  // namespace cumem::emulator
