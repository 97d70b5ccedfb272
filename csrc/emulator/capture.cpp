#include "emulator/capture.h"

#include <algorithm>

#include "emulator/world.h"

namespace cumem::emulator {
namespace {

bool forbids_unsafe_calls(const Capture& capture) {
  const CUstreamCaptureMode mode = this_thread().capture_mode;
  if (mode == CU_STREAM_CAPTURE_MODE_RELAXED) return false;
  if (capture.thread == std::this_thread::get_id()) {
    return capture.mode != CU_STREAM_CAPTURE_MODE_RELAXED;
  }
  return mode == CU_STREAM_CAPTURE_MODE_GLOBAL && capture.mode == CU_STREAM_CAPTURE_MODE_GLOBAL;
}

// Spoils what a use of the legacy stream would drag in. True if there was any.
bool spoil_implicit(const Context& context) {
  bool any = false;
  for (const auto& stream : context.streams) {
    if (!stream->blocking || stream->capture == nullptr) continue;
    stream->capture->spoilt = true;
    any = true;
  }
  return any;
}

}  // namespace

CUresult begin_capture(World& world, const std::shared_ptr<Stream>& stream,
                       CUstreamCaptureMode mode) {
  if (stream->is_legacy()) return CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED;
  if (stream->capture != nullptr) return CUDA_ERROR_ILLEGAL_STATE;
  auto capture = std::make_shared<Capture>(
      Capture{stream->context.device.machine, mode, std::this_thread::get_id(), stream->id, {}});
  capture->members.push_back(stream);
  world.captures.push_back(capture);
  stream->capture = std::move(capture);
  return CUDA_SUCCESS;
}

CUresult end_capture(World& world, Stream& stream, EndedBy by) {
  const std::shared_ptr<Capture> capture = stream.capture;
  if (capture == nullptr) return CUDA_ERROR_ILLEGAL_STATE;
  if (capture->origin != stream.id) return CUDA_ERROR_STREAM_CAPTURE_UNMATCHED;
  const bool own = capture->thread == std::this_thread::get_id();
  if (by == EndedBy::kItsThread && !own && capture->mode != CU_STREAM_CAPTURE_MODE_RELAXED) {
    return CUDA_ERROR_STREAM_CAPTURE_WRONG_THREAD;
  }
  for (const auto& member : capture->members) member->capture.reset();
  capture->members.clear();
  const auto begun = std::find(world.captures.begin(), world.captures.end(), capture);
  if (begun != world.captures.end()) world.captures.erase(begun);
  return capture->spoilt ? CUDA_ERROR_STREAM_CAPTURE_INVALIDATED : CUDA_SUCCESS;
}

void join_capture(const std::shared_ptr<Capture>& capture, const std::shared_ptr<Stream>& stream) {
  if (stream->capture == capture) return;
  capture->members.push_back(stream);
  stream->capture = capture;
}

CUresult pass_unsafe_call(World& world, const Machine& machine) {
  bool refused = false;
  for (const auto& capture : world.captures) {
    if (&capture->machine != &machine || !forbids_unsafe_calls(*capture)) continue;
    capture->spoilt = true;
    refused = true;
  }
  return refused ? CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED : CUDA_SUCCESS;
}

CUresult pass_submission(Stream& stream) {
  if (stream.capture != nullptr && stream.capture->spoilt) {
    return CUDA_ERROR_STREAM_CAPTURE_INVALIDATED;
  }
  if (stream.is_legacy() && spoil_implicit(stream.context)) {
    return CUDA_ERROR_STREAM_CAPTURE_IMPLICIT;
  }
  return CUDA_SUCCESS;
}

CUresult pass_wait(Stream& stream) {
  const CUresult passed = pass_submission(stream);
  if (passed != CUDA_SUCCESS || stream.capture == nullptr) return passed;
  stream.capture->spoilt = true;
  return CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED;
}

CUresult pass_wait(Context& context) {
  bool refused = false;
  for (const auto& stream : context.streams) {
    if (stream->capture == nullptr) continue;
    stream->capture->spoilt = true;
    refused = true;
  }
  return refused ? CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED : CUDA_SUCCESS;
}

CUresult capture_status(const Stream& stream, CUstreamCaptureStatus* status) {
  *status = CU_STREAM_CAPTURE_STATUS_NONE;
  if (stream.capture != nullptr) {
    *status = stream.capture->spoilt ? CU_STREAM_CAPTURE_STATUS_INVALIDATED
                                     : CU_STREAM_CAPTURE_STATUS_ACTIVE;
    return CUDA_SUCCESS;
  }
  if (!stream.is_legacy()) return CUDA_SUCCESS;
  const auto& others = stream.context.streams;
  const bool implicit = std::any_of(others.begin(), others.end(), [](const auto& other) {
    return other->blocking && other->capture != nullptr;
  });
  return implicit ? CUDA_ERROR_STREAM_CAPTURE_IMPLICIT : CUDA_SUCCESS;
}

}  // namespace cumem::emulator
