// The driver calls about modules and kernels.
//
// There is one image, a text, and one kernel in it; see kernel.h. Arguments are
// taken at the call; what they point to is looked at when the launch runs.

#include <cstring>

#include "emulator/call.h"
#include "emulator/kernel.h"

namespace cumem::emulator {
namespace {

constexpr char kImage[] = "cumem emulated digest";  // what an image starts with
constexpr char kKernel[] = "cumem_digest";

bool is_image(const void* image) {
  return std::strncmp(static_cast<const char*>(image), kImage, sizeof(kImage) - 1) == 0;
}

CUresult load(Session& session, CUmodule* id) {
  World& world = session.world;
  const Module made{world.fresh_handle<CUmodule>(), world.fresh_handle<CUfunction>(),
                    *session.context};
  world.modules.emplace(made.id, made);
  *id = made.id;
  return CUDA_SUCCESS;
}

CUresult get_function(const World& world, CUmodule id, const char* name, CUfunction* function) {
  const auto found = world.modules.find(id);
  if (found == world.modules.end()) return CUDA_ERROR_INVALID_HANDLE;
  if (std::strcmp(name, kKernel) != 0) return CUDA_ERROR_NOT_FOUND;
  *function = found->second.digest;
  return CUDA_SUCCESS;
}

struct Shape {
  unsigned grid[3];
  unsigned block[3];
  unsigned shared_bytes;
};

// Other block sizes would compute something else; none is a use of the kernel.
bool is_good(const Shape& shape) {
  return shape.grid[0] != 0 && shape.grid[1] == 1 && shape.grid[2] == 1 &&
         shape.block[0] == kDigestThreads && shape.block[1] == 1 && shape.block[2] == 1 &&
         shape.shared_bytes == 0;
}

// pre: arguments has two entries, neither of them null.
Launch launch_of(CUfunction function, unsigned count, void** arguments) {
  Launch launch;
  launch.function = function;
  launch.count = count;
  std::memcpy(&launch.pieces, arguments[0], sizeof(launch.pieces));
  std::memcpy(&launch.digests, arguments[1], sizeof(launch.digests));
  return launch;
}

CUresult queue(Session& session, CUstream handle, const Launch& launch) {
  const Module* const module = find_module(session.world, launch.function);
  if (module == nullptr) return CUDA_ERROR_INVALID_HANDLE;
  std::shared_ptr<Stream> stream;
  const CUresult found = find_stream(session.world, session.context, handle, &stream);
  if (found != CUDA_SUCCESS) return found;
  if (&stream->context != &module->context) return CUDA_ERROR_INVALID_HANDLE;
  const CUresult passed = pass_submission(*stream);
  if (passed != CUDA_SUCCESS || stream->capture != nullptr) return passed;
  Work work;
  work.kind = Work::Kind::kDigest;
  work.launch = launch;
  submit(stream, std::move(work));
  return CUDA_SUCCESS;
}

}  // namespace
}  // namespace cumem::emulator

using namespace cumem::emulator;

CUresult CUDAAPI cuModuleLoadData(CUmodule* module, const void* image) {
  const Call call{"cuModuleLoadData", Subject::context(), kUnderContext | kUnsafe};
  return guarded(call, [&](Session& session) {
    if (module == nullptr || image == nullptr) return CUDA_ERROR_INVALID_VALUE;
    return is_image(image) ? load(session, module) : CUDA_ERROR_INVALID_IMAGE;
  });
}

CUresult CUDAAPI cuModuleUnload(CUmodule module) {
  const Call call{"cuModuleUnload", Subject::context(), kUnderContext | kUnsafe};
  return guarded(call, [&](Session& session) {
    return session.world.modules.erase(module) == 1 ? CUDA_SUCCESS : CUDA_ERROR_INVALID_HANDLE;
  });
}

CUresult CUDAAPI cuModuleGetFunction(CUfunction* function, CUmodule module, const char* name) {
  const Call call{"cuModuleGetFunction", Subject::context(), kUnderContext};
  return guarded(call, [&](Session& session) {
    if (function == nullptr || name == nullptr) return CUDA_ERROR_INVALID_VALUE;
    return get_function(session.world, module, name, function);
  });
}

CUresult CUDAAPI cuLaunchKernel(CUfunction function, unsigned int grid_x, unsigned int grid_y,
                                unsigned int grid_z, unsigned int block_x, unsigned int block_y,
                                unsigned int block_z, unsigned int shared_bytes, CUstream stream,
                                void** arguments, void** extra) {
  const Call call{"cuLaunchKernel", Subject::stream(stream), kUnderContext};
  return guarded(call, [&](Session& session) {
    const Shape shape{{grid_x, grid_y, grid_z}, {block_x, block_y, block_z}, shared_bytes};
    const bool given = arguments != nullptr && arguments[0] != nullptr && arguments[1] != nullptr;
    if (!is_good(shape) || !given || extra != nullptr) return CUDA_ERROR_INVALID_VALUE;
    return queue(session, stream, launch_of(function, grid_x, arguments));
  });
}
