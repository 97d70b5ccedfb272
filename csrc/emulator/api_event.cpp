// The driver calls about events.

#include "emulator/call.h"

namespace cumem::emulator {
namespace {

template <class Body>
CUresult about_event(const char* name, CUevent id, Body body) noexcept {
  return guarded({name, Subject::event(id), kOnObject}, [&](Session& session) {
    const auto found = session.world.events.find(id);
    if (found == session.world.events.end()) return CUDA_ERROR_INVALID_HANDLE;
    const std::shared_ptr<Event> event = found->second;
    return body(session, *event);
  });
}

// Asking or waiting for an event that was recorded in a capture spoils the capture;
// for any other event it is a potentially unsafe call.
CUresult pass_event(const Session& session, const Event& event) {
  if (event.inside == nullptr) return pass_unsafe_call(session.world, *session.machine);
  event.inside->spoilt = true;
  return CUDA_ERROR_CAPTURED_EVENT;
}

CUresult record(Event& event, const std::shared_ptr<Stream>& stream) {
  if (&stream->context != &event.context) return CUDA_ERROR_INVALID_HANDLE;
  const CUresult passed = pass_submission(*stream);
  if (passed != CUDA_SUCCESS) return passed;
  if (stream->capture == nullptr) submit(stream, {});
  event.inside = stream->capture;
  event.point = {stream, stream->submitted};
  return CUDA_SUCCESS;
}

// A stream that waits for a captured event joins the capture; a capturing stream
// cannot wait for what is outside it.
CUresult wait_in_capture(const Event& event, const std::shared_ptr<Stream>& stream) {
  const std::shared_ptr<Capture>& theirs = event.inside;
  if (stream->capture == theirs) return CUDA_SUCCESS;
  if (theirs == nullptr) {
    stream->capture->spoilt = true;
    return CUDA_ERROR_STREAM_CAPTURE_ISOLATION;
  }
  if (theirs->spoilt || theirs->members.empty()) return CUDA_ERROR_STREAM_CAPTURE_INVALIDATED;
  if (stream->capture != nullptr) {
    stream->capture->spoilt = true;
    theirs->spoilt = true;
    return CUDA_ERROR_STREAM_CAPTURE_MERGE;
  }
  if (stream->is_legacy()) return CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED;
  join_capture(theirs, stream);
  return CUDA_SUCCESS;
}

CUresult wait(const Event& event, const std::shared_ptr<Stream>& stream) {
  const CUresult passed = pass_submission(*stream);
  if (passed != CUDA_SUCCESS) return passed;
  if (event.inside != nullptr || stream->capture != nullptr) return wait_in_capture(event, stream);
  if (event.point.reached()) return CUDA_SUCCESS;
  submit(stream, {}, {event.point});
  return CUDA_SUCCESS;
}

}  // namespace
}  // namespace cumem::emulator

using namespace cumem::emulator;

CUresult CUDAAPI cuEventCreate(CUevent* id, unsigned int flags) {
  return guarded({"cuEventCreate", Subject::context(), kUnderContext}, [&](Session& session) {
    constexpr unsigned kKnown =
        CU_EVENT_BLOCKING_SYNC | CU_EVENT_DISABLE_TIMING | CU_EVENT_INTERPROCESS;
    if (id == nullptr || (flags & ~kKnown) != 0) return CUDA_ERROR_INVALID_VALUE;
    World& world = session.world;
    auto event =
        std::make_shared<Event>(Event{world.fresh_handle<CUevent>(), *session.context, {}, {}});
    *id = event->id;
    world.events.emplace(event->id, std::move(event));
    return CUDA_SUCCESS;
  });
}

CUresult CUDAAPI cuEventDestroy(CUevent id) {
  return about_event("cuEventDestroy", id, [](Session& session, Event& event) {
    session.world.events.erase(event.id);
    return CUDA_SUCCESS;
  });
}

CUresult CUDAAPI cuEventRecord(CUevent id, CUstream handle) {
  return about_event("cuEventRecord", id, [&](Session& session, Event& event) {
    std::shared_ptr<Stream> stream;
    const CUresult found = find_stream(session.world, session.context, handle, &stream);
    return found == CUDA_SUCCESS ? record(event, stream) : found;
  });
}

CUresult CUDAAPI cuStreamWaitEvent(CUstream handle, CUevent id, unsigned int flags) {
  return about_event("cuStreamWaitEvent", id, [&](Session& session, Event& event) {
    if (flags != CU_EVENT_WAIT_DEFAULT) return CUDA_ERROR_INVALID_VALUE;
    std::shared_ptr<Stream> stream;
    const CUresult found = find_stream(session.world, session.context, handle, &stream);
    return found == CUDA_SUCCESS ? wait(event, stream) : found;
  });
}

CUresult CUDAAPI cuEventQuery(CUevent id) {
  return about_event("cuEventQuery", id, [](Session& session, Event& event) {
    const CUresult passed = pass_event(session, event);
    if (passed != CUDA_SUCCESS) return passed;
    return event.point.reached() ? CUDA_SUCCESS : CUDA_ERROR_NOT_READY;
  });
}

CUresult CUDAAPI cuEventSynchronize(CUevent id) {
  return about_event("cuEventSynchronize", id, [](Session& session, Event& event) {
    const CUresult passed = pass_event(session, event);
    if (passed != CUDA_SUCCESS) return passed;
    return wait_for(session.world, session.lock, {event.point}, event.context);
  });
}
