// The driver calls that move bytes, and those that register host memory.
//
// Note [Pageable memory]: the driver reads a pageable source before it returns and
// has written a pageable target when it returns; with registered memory both happen
// when the work runs. A source of up to 64 KiB is staged; otherwise the call waits.

#include <cstring>
#include <utility>

#include "emulator/call.h"

namespace cumem::emulator {
namespace {

constexpr std::size_t kStagedAtMost = std::size_t{64} << 10;

enum class Return { kWhenQueued, kWhenDone };

CUresult check_device_range(const Session& session, const Stream& stream, const Work& work) {
  const Touch touch = work.kind == Work::Kind::kToHost ? Touch::kRead : Touch::kWrite;
  const CUdevice device = stream.context.device.value();
  const bool ok = session.world.addresses.reachable(work.device, device, touch);
  return ok ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

// Looks at the host side of a copy, and decides when the call returns.
CUresult prepare_host(const Session& session, Work& work, Return& returns) {
  if (work.kind == Work::Kind::kFill) return CUDA_SUCCESS;
  const Range host{reinterpret_cast<std::uintptr_t>(work.host), work.device.bytes};
  if (work.host == nullptr || host.wraps() || session.world.addresses.touches(host)) {
    return CUDA_ERROR_INVALID_VALUE;
  }
  const HostKind kind = session.world.hosts.kind_of(host);
  if (kind == HostKind::kStraddling) return CUDA_ERROR_INVALID_VALUE;
  work.host_is_registered = kind == HostKind::kRegistered;
  if (work.host_is_registered) return CUDA_SUCCESS;
  if (work.kind == Work::Kind::kToDevice && host.bytes <= kStagedAtMost) {
    work.staged.assign(work.host, work.host + host.bytes);
  } else {
    returns = Return::kWhenDone;
  }
  return CUDA_SUCCESS;
}

CUresult queue(Session& session, CUstream handle, Work work, Return returns) {
  std::shared_ptr<Stream> stream;
  const CUresult found = find_stream(session.world, session.context, handle, &stream);
  if (found != CUDA_SUCCESS) return found;
  const CUresult passed = pass_submission(*stream);
  if (passed != CUDA_SUCCESS || work.device.bytes == 0) return passed;
  const CUresult checked = check_device_range(session, *stream, work);
  if (checked != CUDA_SUCCESS) return checked;
  const CUresult prepared = prepare_host(session, work, returns);
  if (prepared != CUDA_SUCCESS || stream->capture != nullptr) return prepared;
  submit(stream, std::move(work));
  if (returns == Return::kWhenQueued) return CUDA_SUCCESS;
  return wait_for(session.world, session.lock, {{stream, stream->submitted}}, stream->context);
}

Work to_host(void* host, CUdeviceptr device, std::size_t bytes) {
  Work work;
  work.kind = Work::Kind::kToHost;
  work.device = {device, bytes};
  work.host = static_cast<std::byte*>(host);
  return work;
}

// The source is only read.
Work to_device(CUdeviceptr device, const void* host, std::size_t bytes) {
  Work work;
  work.kind = Work::Kind::kToDevice;
  work.device = {device, bytes};
  work.host = static_cast<std::byte*>(const_cast<void*>(host));
  return work;
}

#if CUDA_VERSION >= 12080

CUresult queue_between(Session& session, CUstream stream, CUdeviceptr target, CUdeviceptr source,
                       std::size_t bytes) {
  const Range written{target, bytes};
  Work work = session.world.addresses.touches(written)
                  ? to_device(target, reinterpret_cast<const void*>(source), bytes)
                  : to_host(reinterpret_cast<void*>(target), source, bytes);
  return queue(session, stream, std::move(work), Return::kWhenQueued);
}

// Last first: nobody may count on an order within a batch.
CUresult queue_all(Session& session, CUstream stream, const CUdeviceptr* targets,
                   const CUdeviceptr* sources, const std::size_t* sizes, std::size_t count) {
  CUresult result = CUDA_SUCCESS;
  for (std::size_t i = count; i > 0 && result == CUDA_SUCCESS; --i)
    result = queue_between(session, stream, targets[i - 1], sources[i - 1], sizes[i - 1]);
  return result;
}

#endif

CUresult register_host(Session& session, const Range& range) {
  World& world = session.world;
  const Machine& machine = *session.machine;
  if (range.begin == 0 || range.bytes == 0 || range.wraps()) return CUDA_ERROR_INVALID_VALUE;
  if (machine.refuses_host_memory) return CUDA_ERROR_NOT_PERMITTED;
  if (world.addresses.touches(range) || !is_host_memory(range)) return CUDA_ERROR_INVALID_VALUE;
  std::uint64_t registered = 0;
  for (const auto& [begin, other] : world.hosts.all()) {
    if (&other.context.device.machine == &machine) registered += other.range.bytes;
  }
  const bool fits =
      registered <= machine.host_limit && range.bytes <= machine.host_limit - registered;
  return fits ? world.hosts.add(range, *session.context) : CUDA_ERROR_OUT_OF_MEMORY;
}

CUresult unregister_host(Session& session, std::uintptr_t begin) {
  World& world = session.world;
  const Registration* const found = world.hosts.starting_at(begin);
  if (found == nullptr) return CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED;
  world.wait_until_still(session.lock, Range(found->range));
  if (world.hosts.starting_at(begin) == nullptr) return CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED;
  world.hosts.remove(begin);
  return CUDA_SUCCESS;
}

}  // namespace
}  // namespace cumem::emulator

using namespace cumem::emulator;

CUresult CUDAAPI cuMemcpyHtoD(CUdeviceptr device, const void* host, size_t bytes) {
  const Call call{"cuMemcpyHtoD", Subject::context(), kUnderContext | kUnsafe};
  return guarded(call, [&](Session& session) {
    return queue(session, nullptr, to_device(device, host, bytes), Return::kWhenDone);
  });
}

CUresult CUDAAPI cuMemcpyDtoH(void* host, CUdeviceptr device, size_t bytes) {
  const Call call{"cuMemcpyDtoH", Subject::context(), kUnderContext | kUnsafe};
  return guarded(call, [&](Session& session) {
    return queue(session, nullptr, to_host(host, device, bytes), Return::kWhenDone);
  });
}

CUresult CUDAAPI cuMemcpyHtoDAsync(CUdeviceptr device, const void* host, size_t bytes,
                                   CUstream stream) {
  const Call call{"cuMemcpyHtoDAsync", Subject::stream(stream), kUnderContext};
  return guarded(call, [&](Session& session) {
    return queue(session, stream, to_device(device, host, bytes), Return::kWhenQueued);
  });
}

CUresult CUDAAPI cuMemcpyDtoHAsync(void* host, CUdeviceptr device, size_t bytes, CUstream stream) {
  const Call call{"cuMemcpyDtoHAsync", Subject::stream(stream), kUnderContext};
  return guarded(call, [&](Session& session) {
    return queue(session, stream, to_host(host, device, bytes), Return::kWhenQueued);
  });
}

#if CUDA_VERSION >= 13000
#define CUMEM_INDEX_PARAMETER
#elif CUDA_VERSION >= 12080
#define CUMEM_INDEX_PARAMETER size_t* /* index of the copy that failed */,
#endif

#if CUDA_VERSION >= 12080

// Of the attributes nothing depends here but that there are some, from the first copy on.
CUresult CUDAAPI cuMemcpyBatchAsync(CUdeviceptr* targets, CUdeviceptr* sources, size_t* sizes,
                                    size_t count, CUmemcpyAttributes* attributes, size_t* firsts,
                                    size_t attribute_count, CUMEM_INDEX_PARAMETER CUstream stream) {
  const Call call{"cuMemcpyBatchAsync", Subject::stream(stream), kUnderContext};
  return guarded(call, [&](Session& session) {
    const bool given = targets != nullptr && sources != nullptr && sizes != nullptr &&
                       attributes != nullptr && firsts != nullptr;
    if (!given || count == 0 || attribute_count == 0 || attribute_count > count || firsts[0] != 0 ||
        stream == nullptr) {
      return CUDA_ERROR_INVALID_VALUE;
    }
    return queue_all(session, stream, targets, sources, sizes, count);
  });
}

#endif

CUresult CUDAAPI cuMemsetD8Async(CUdeviceptr device, unsigned char value, size_t bytes,
                                 CUstream stream) {
  const Call call{"cuMemsetD8Async", Subject::stream(stream), kUnderContext};
  return guarded(call, [&](Session& session) {
    Work work;
    work.kind = Work::Kind::kFill;
    work.device = {device, bytes};
    work.value = value;
    return queue(session, stream, std::move(work), Return::kWhenQueued);
  });
}

CUresult CUDAAPI cuMemHostRegister(void* host, size_t bytes, unsigned int flags) {
  const Call call{"cuMemHostRegister", Subject::context(), kUnderContext | kUnsafe};
  return guarded(call, [&](Session& session) {
    constexpr unsigned kKnown = CU_MEMHOSTREGISTER_PORTABLE | CU_MEMHOSTREGISTER_DEVICEMAP |
                                CU_MEMHOSTREGISTER_IOMEMORY | CU_MEMHOSTREGISTER_READ_ONLY;
    if ((flags & ~kKnown) != 0) return CUDA_ERROR_INVALID_VALUE;
    return register_host(session, {reinterpret_cast<std::uintptr_t>(host), bytes});
  });
}

CUresult CUDAAPI cuMemHostUnregister(void* host) {
  const Call call{"cuMemHostUnregister", Subject::context(), kUnderContext | kUnsafe};
  return guarded(call, [&](Session& session) {
    return unregister_host(session, reinterpret_cast<std::uintptr_t>(host));
  });
}
