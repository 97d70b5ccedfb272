#include "emulator/call.h"

namespace cumem::emulator {
namespace {

// What a subject resolves to; the device is null when it names none.
struct Found {
  Machine* machine = nullptr;
  Device* device = nullptr;
};

Found found(Device* device) {
  return device == nullptr ? Found{} : Found{&device->machine, device};
}

template <class Map, class Key>
auto lookup(const Map& map, Key key) -> const typename Map::mapped_type* {
  const auto entry = map.find(key);
  return entry == map.end() ? nullptr : &entry->second;
}

Found find_address(const World& world, std::uintptr_t address) {
  if (const Mapping* mapping = world.addresses.mapping_at(address)) {
    return found(&mapping->physical->device);
  }
  const Reservation* const home = world.addresses.reservation_at(address);
  return home == nullptr ? Found{} : Found{&home->machine, nullptr};
}

Found find_object(World& world, const Subject& subject) {
  switch (subject.kind) {
    case Subject::Kind::kProcess:
      return {world.machine(world.current), nullptr};
    case Subject::Kind::kContext:
      return {};
    case Subject::Kind::kDevice:
      return found(world.device(static_cast<CUdevice>(subject.value)));
    case Subject::Kind::kContextHandle: {
      const auto* context = lookup(world.contexts, reinterpret_cast<CUcontext>(subject.value));
      return context == nullptr ? Found{} : found(&(*context)->device);
    }
    case Subject::Kind::kStream: {
      const auto* stream = lookup(world.streams, reinterpret_cast<CUstream>(subject.value));
      return stream == nullptr ? Found{} : found(&(*stream)->context.device);
    }
    case Subject::Kind::kEvent: {
      const auto* event = lookup(world.events, reinterpret_cast<CUevent>(subject.value));
      return event == nullptr ? Found{} : found(&(*event)->context.device);
    }
    case Subject::Kind::kHandle: {
      const auto* handle = lookup(world.handles, subject.value);
      return handle == nullptr ? Found{} : found(&handle->physical->device);
    }
    case Subject::Kind::kAddress:
      return find_address(world, subject.value);
  }
  return {};
}

// The context whose death concerns the call.
const Context* concerned(const Session& session, const Found& object) {
  if (object.device != nullptr) return &object.device->context;
  const Context* const current = session.context;
  const bool same = current != nullptr && &current->device.machine == session.machine;
  return same ? current : nullptr;
}

CUresult check_context(const Session& session) {
  if (session.context == nullptr) return CUDA_ERROR_INVALID_CONTEXT;
  return session.context->active() ? CUDA_SUCCESS : CUDA_ERROR_CONTEXT_IS_DESTROYED;
}

}  // namespace

CUresult admit(Session& session, const Call& call) {
  World& world = session.world;
  session.context = this_thread().context();
  const Found object = find_object(world, call.subject);
  session.machine = object.machine;
  if (session.machine == nullptr && session.context != nullptr) {
    session.machine = &session.context->device.machine;
  }
  if (session.machine == nullptr) session.machine = world.machine(world.current);

  const CUresult injected = session.machine->faults.on_call(call.name);
  if (injected != CUDA_SUCCESS) return injected;
  if ((call.rules & kInitialised) != 0 && !world.initialised) return CUDA_ERROR_NOT_INITIALIZED;
  if ((call.rules & kCurrent) != 0) {
    const CUresult checked = check_context(session);
    if (checked != CUDA_SUCCESS) return checked;
  }
  const Context* const context = concerned(session, object);
  if ((call.rules & kAlive) != 0 && context != nullptr && context->dead()) return context->death;
  if ((call.rules & kUnsafe) != 0) return pass_unsafe_call(world, *session.machine);
  return CUDA_SUCCESS;
}

}  // namespace cumem::emulator
