// What does a stream capture forbid, and what spoils it?
//
// Note [Captures]: work given to a capturing stream is recorded, that is, dropped
// here. Asking or waiting for a captured stream, a captured event, or something
// that includes a captured stream (the context; the legacy stream when a blocking
// stream captures) spoils the capture. So does a potentially unsafe call by a
// thread whose mode forbids it: any capture of its own that was not begun RELAXED
// unless its mode is RELAXED, and another thread's that was begun GLOBAL if its
// mode is GLOBAL. A spoilt capture goes on to its end, which then fails. Not
// modelled: a stream that joined a capture and was never joined back.
#pragma once

#include <memory>
#include <thread>
#include <vector>

#include "emulator/driver_api.h"
#include "emulator/machine.h"

namespace cumem::emulator {

struct Capture {
  Machine& machine;
  CUstreamCaptureMode mode;
  std::thread::id thread;
  CUstream origin;
  std::vector<std::shared_ptr<Stream>> members;  // the origin first
  bool spoilt = false;
};

class World;

// Begins a capture on a stream by the calling thread.
CUresult begin_capture(World& world, const std::shared_ptr<Stream>& stream,
                       CUstreamCaptureMode mode);

enum class EndedBy { kItsThread, kAnyThread };

// Ends the capture that the stream began. On any outcome but "there is none here"
// and "not this thread's" no stream is in it afterwards.
CUresult end_capture(World& world, Stream& stream, EndedBy by);

// A stream joins a capture because it waits for something captured.
void join_capture(const std::shared_ptr<Capture>& capture, const std::shared_ptr<Stream>& stream);

// A potentially unsafe call is made by the calling thread: CUDA_SUCCESS, or what
// it must return, having spoilt the captures it harms.
CUresult pass_unsafe_call(World& world, const Machine& machine);

// Work is given to the stream: CUDA_SUCCESS (also when it is to be recorded), or
// the refusal.
CUresult pass_submission(Stream& stream);

// Somebody asks or waits for a stream, or for a whole context: the same.
CUresult pass_wait(Stream& stream);
CUresult pass_wait(Context& context);

// cuStreamIsCapturing: harms nothing.
CUresult capture_status(const Stream& stream, CUstreamCaptureStatus* status);

}  // namespace cumem::emulator
