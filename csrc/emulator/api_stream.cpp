// The driver calls about streams and their captures.

#include "emulator/call.h"

namespace cumem::emulator {
namespace {

template <class Body>
CUresult about_stream(const char* name, CUstream handle, Body body) noexcept {
  return guarded({name, Subject::stream(handle), kOnObject}, [&](Session& session) {
    std::shared_ptr<Stream> stream;
    const CUresult found = find_stream(session.world, session.context, handle, &stream);
    return found == CUDA_SUCCESS ? body(session, stream) : found;
  });
}

bool is_mode(CUstreamCaptureMode mode) {
  return mode == CU_STREAM_CAPTURE_MODE_GLOBAL || mode == CU_STREAM_CAPTURE_MODE_THREAD_LOCAL ||
         mode == CU_STREAM_CAPTURE_MODE_RELAXED;
}

}  // namespace
}  // namespace cumem::emulator

using namespace cumem::emulator;

CUresult CUDAAPI cuStreamCreate(CUstream* stream, unsigned int flags) {
  return guarded({"cuStreamCreate", Subject::context(), kUnderContext}, [&](Session& session) {
    const bool known = flags == CU_STREAM_DEFAULT || flags == CU_STREAM_NON_BLOCKING;
    if (stream == nullptr || !known) return CUDA_ERROR_INVALID_VALUE;
    const bool blocking = flags == CU_STREAM_DEFAULT;
    *stream = add_stream(session.world, *session.context, blocking)->id;
    return CUDA_SUCCESS;
  });
}

CUresult CUDAAPI cuStreamDestroy(CUstream handle) {
  return about_stream("cuStreamDestroy", handle, [](Session& session, const auto& stream) {
    if (stream->is_legacy()) return CUDA_ERROR_INVALID_HANDLE;
    destroy_stream(session.world, stream);
    return CUDA_SUCCESS;
  });
}

CUresult CUDAAPI cuStreamSynchronize(CUstream handle) {
  return about_stream("cuStreamSynchronize", handle, [](Session& session, const auto& stream) {
    const CUresult passed = pass_wait(*stream);
    if (passed != CUDA_SUCCESS) return passed;
    return wait_for(session.world, session.lock, everything_on(stream), stream->context);
  });
}

CUresult CUDAAPI cuStreamQuery(CUstream handle) {
  return about_stream("cuStreamQuery", handle, [](Session&, const auto& stream) {
    const CUresult passed = pass_wait(*stream);
    if (passed != CUDA_SUCCESS) return passed;
    for (const Point& point : everything_on(stream)) {
      if (!point.reached()) return CUDA_ERROR_NOT_READY;
    }
    return CUDA_SUCCESS;
  });
}

CUresult CUDAAPI cuStreamIsCapturing(CUstream handle, CUstreamCaptureStatus* status) {
  return about_stream("cuStreamIsCapturing", handle, [&](Session&, const auto& stream) {
    return status == nullptr ? CUDA_ERROR_INVALID_VALUE : capture_status(*stream, status);
  });
}

CUresult CUDAAPI cuStreamBeginCapture(CUstream handle, CUstreamCaptureMode mode) {
  return about_stream("cuStreamBeginCapture", handle, [&](Session& session, const auto& stream) {
    if (!is_mode(mode)) return CUDA_ERROR_INVALID_VALUE;
    return begin_capture(session.world, stream, mode);
  });
}

// The graph is a name only: nothing can be done with it.
CUresult CUDAAPI cuStreamEndCapture(CUstream handle, CUgraph* graph) {
  return about_stream("cuStreamEndCapture", handle, [&](Session& session, const auto& stream) {
    if (graph == nullptr) return CUDA_ERROR_INVALID_VALUE;
    const CUresult ended = end_capture(session.world, *stream, EndedBy::kItsThread);
    *graph = ended == CUDA_SUCCESS ? session.world.fresh_handle<CUgraph>() : nullptr;
    return ended;
  });
}

CUresult CUDAAPI cuThreadExchangeStreamCaptureMode(CUstreamCaptureMode* mode) {
  const Call call{"cuThreadExchangeStreamCaptureMode", Subject::context(), kQuery};
  return guarded(call, [&](Session&) {
    if (mode == nullptr || !is_mode(*mode)) return CUDA_ERROR_INVALID_VALUE;
    std::swap(*mode, this_thread().capture_mode);
    return CUDA_SUCCESS;
  });
}
