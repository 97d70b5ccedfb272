// The driver calls about the driver itself, its devices and their contexts.

#include <algorithm>
#include <cstdio>
#include <cstring>

#include "emulator/call.h"

namespace cumem::emulator {
namespace {

constexpr int kDriverVersion = 13000;
constexpr char kDeviceName[] = "cumem emulated device";

CUresult copy_text(const char* text, char* to, int bytes) {
  if (to == nullptr || bytes <= 0) return CUDA_ERROR_INVALID_VALUE;
  std::snprintf(to, static_cast<std::size_t>(bytes), "%s", text);
  return CUDA_SUCCESS;
}

template <class Body>
CUresult about_device(const char* name, CUdevice device, Body body) noexcept {
  return guarded({name, Subject::device(device), kQuery}, [&](Session& session) {
    Device* const found = session.world.device(device);
    return found == nullptr ? CUDA_ERROR_INVALID_DEVICE : body(session, *found);
  });
}

CUresult push(Session& session, CUcontext id) {
  const auto found = session.world.contexts.find(id);
  if (found == session.world.contexts.end()) return CUDA_ERROR_INVALID_CONTEXT;
  if (!found->second->active()) return CUDA_ERROR_CONTEXT_IS_DESTROYED;
  this_thread().stack.push_back(found->second);
  return CUDA_SUCCESS;
}

CUresult pop(CUcontext* id) {
  auto& stack = this_thread().stack;
  if (stack.empty()) return CUDA_ERROR_INVALID_CONTEXT;
  if (id != nullptr) *id = stack.back()->id;
  stack.pop_back();
  return CUDA_SUCCESS;
}

CUresult release_context(Session& session, Context& context) {
  if (context.retains == 0) return CUDA_ERROR_INVALID_CONTEXT;
  --context.retains;
  if (!context.active()) session.world.reset(session.lock, context);
  return CUDA_SUCCESS;
}

}  // namespace
}  // namespace cumem::emulator

using namespace cumem::emulator;

CUresult CUDAAPI cuInit(unsigned int flags) {
  return guarded({"cuInit", Subject::process(), kAnytime}, [&](Session& session) {
    if (flags != 0) return CUDA_ERROR_INVALID_VALUE;
    session.world.initialised = true;
    return CUDA_SUCCESS;
  });
}

CUresult CUDAAPI cuDriverGetVersion(int* version) {
  return guarded({"cuDriverGetVersion", Subject::process(), kAnytime}, [&](Session&) {
    if (version == nullptr) return CUDA_ERROR_INVALID_VALUE;
    *version = kDriverVersion;
    return CUDA_SUCCESS;
  });
}

CUresult CUDAAPI cuDeviceGetCount(int* count) {
  return guarded({"cuDeviceGetCount", Subject::process(), kQuery}, [&](Session& session) {
    if (count == nullptr) return CUDA_ERROR_INVALID_VALUE;
    *count = static_cast<int>(session.machine->devices.size());
    return CUDA_SUCCESS;
  });
}

CUresult CUDAAPI cuDeviceGet(CUdevice* device, int ordinal) {
  return guarded({"cuDeviceGet", Subject::process(), kQuery}, [&](Session& session) {
    if (device == nullptr) return CUDA_ERROR_INVALID_VALUE;
    const Device* const found = session.world.device(session.machine->index, ordinal);
    if (found == nullptr) return CUDA_ERROR_INVALID_DEVICE;
    *device = found->value();
    return CUDA_SUCCESS;
  });
}

CUresult CUDAAPI cuDeviceGetName(char* name, int bytes, CUdevice device) {
  return about_device("cuDeviceGetName", device,
                      [&](Session&, Device&) { return copy_text(kDeviceName, name, bytes); });
}

CUresult CUDAAPI cuDeviceGetPCIBusId(char* text, int bytes, CUdevice device) {
  return about_device("cuDeviceGetPCIBusId", device, [&](Session&, Device& found) {
    char made_up[32];
    const auto domain = static_cast<unsigned>(found.machine.index) & 0xFFFFu;
    const auto bus = static_cast<unsigned>(found.ordinal) + 1u;
    std::snprintf(made_up, sizeof(made_up), "%04X:%02X:00.0", domain, bus);
    return copy_text(made_up, text, bytes);
  });
}

CUresult CUDAAPI cuDeviceGetAttribute(int* value, CUdevice_attribute attribute, CUdevice device) {
  return about_device("cuDeviceGetAttribute", device, [&](Session&, Device& found) {
    const auto known = found.machine.attribute(attribute);
    if (value == nullptr || !known) return CUDA_ERROR_INVALID_VALUE;
    *value = *known;
    return CUDA_SUCCESS;
  });
}

CUresult CUDAAPI cuDeviceTotalMem(size_t* bytes, CUdevice device) {
  return about_device("cuDeviceTotalMem", device, [&](Session&, Device& found) {
    if (bytes == nullptr) return CUDA_ERROR_INVALID_VALUE;
    *bytes = found.backing.capacity();
    return CUDA_SUCCESS;
  });
}

CUresult CUDAAPI cuDeviceCanAccessPeer(int* can, CUdevice device, CUdevice peer) {
  return about_device("cuDeviceCanAccessPeer", device, [&](Session& session, Device& found) {
    const Device* const other = session.world.device(peer);
    if (other == nullptr) return CUDA_ERROR_INVALID_DEVICE;
    if (can == nullptr) return CUDA_ERROR_INVALID_VALUE;
    *can = other != &found && &other->machine == &found.machine ? 1 : 0;
    return CUDA_SUCCESS;
  });
}

CUresult CUDAAPI cuDevicePrimaryCtxRetain(CUcontext* context, CUdevice device) {
  return about_device("cuDevicePrimaryCtxRetain", device, [&](Session&, Device& found) {
    if (context == nullptr) return CUDA_ERROR_INVALID_VALUE;
    ++found.context.retains;
    *context = found.context.id;
    return CUDA_SUCCESS;
  });
}

CUresult CUDAAPI cuDevicePrimaryCtxRelease(CUdevice device) {
  return about_device("cuDevicePrimaryCtxRelease", device, [&](Session& session, Device& found) {
    return release_context(session, found.context);
  });
}

CUresult CUDAAPI cuCtxGetCurrent(CUcontext* context) {
  return guarded({"cuCtxGetCurrent", Subject::context(), kQuery}, [&](Session& session) {
    if (context == nullptr) return CUDA_ERROR_INVALID_VALUE;
    *context = session.context == nullptr ? nullptr : session.context->id;
    return CUDA_SUCCESS;
  });
}

CUresult CUDAAPI cuCtxPushCurrent(CUcontext context) {
  return guarded({"cuCtxPushCurrent", Subject::context(context), kQuery},
                 [&](Session& session) { return push(session, context); });
}

CUresult CUDAAPI cuCtxPopCurrent(CUcontext* context) {
  return guarded({"cuCtxPopCurrent", Subject::context(), kQuery},
                 [&](Session&) { return pop(context); });
}

CUresult CUDAAPI cuCtxSynchronize() {
  return guarded({"cuCtxSynchronize", Subject::context(), kUnderContext}, [&](Session& session) {
    Context& context = *session.context;
    const CUresult passed = pass_wait(context);
    if (passed != CUDA_SUCCESS) return passed;
    return wait_for(session.world, session.lock, everything_in(context), context);
  });
}
