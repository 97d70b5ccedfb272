// Does the emulated driver spoil a stream capture when the driver would, and only then?

#include <thread>

#include "computer.h"

namespace {

CUstreamCaptureStatus status_of(const Computer& pc, CUstream stream) {
  CUstreamCaptureStatus status = CU_STREAM_CAPTURE_STATUS_NONE;
  CHECK_OK(pc.cu.cuStreamIsCapturing(stream, &status));
  return status;
}

void begin(const Computer& pc, CUstream stream) {
  REQUIRE_OK(pc.cu.cuStreamBeginCapture(stream, CU_STREAM_CAPTURE_MODE_GLOBAL));
}

CUresult end(const Computer& pc, CUstream stream) {
  CUgraph graph = nullptr;
  return pc.cu.cuStreamEndCapture(stream, &graph);
}

TEST(work_given_to_a_capture_is_recorded_and_not_run) {
  const Computer pc;
  const Chunk chunk(pc);
  const StreamOf mine(pc);
  const auto before = chunk.contents();
  begin(pc, mine.stream);
  CHECK_EQ(status_of(pc, mine.stream), CU_STREAM_CAPTURE_STATUS_ACTIVE);
  CHECK_OK(pc.cu.cuMemsetD8Async(chunk.pointer, 0, kChunk, mine.stream));
  CHECK_OK(end(pc, mine.stream));
  CHECK_EQ(status_of(pc, mine.stream), CU_STREAM_CAPTURE_STATUS_NONE);
  CHECK_OK(pc.cu.cuCtxSynchronize());
  CHECK(chunk.contents() == before);
}

template <class Harm>
void expect_spoilt(const Computer& pc, CUresult answer, Harm harm) {
  const StreamOf mine(pc, CU_STREAM_DEFAULT);
  begin(pc, mine.stream);
  CHECK_EQ(harm(mine.stream), answer);
  CHECK_EQ(status_of(pc, mine.stream), CU_STREAM_CAPTURE_STATUS_INVALIDATED);
  CHECK_EQ(end(pc, mine.stream), CUDA_ERROR_STREAM_CAPTURE_INVALIDATED);
}

TEST(waiting_for_a_capture_spoils_it) {
  const Computer pc;
  const auto refused = CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED;
  expect_spoilt(pc, refused, [&](CUstream s) { return pc.cu.cuStreamSynchronize(s); });
  expect_spoilt(pc, refused, [&](CUstream s) { return pc.cu.cuStreamQuery(s); });
  expect_spoilt(pc, refused, [&](CUstream) { return pc.cu.cuCtxSynchronize(); });
  const auto implicit = CUDA_ERROR_STREAM_CAPTURE_IMPLICIT;
  expect_spoilt(pc, implicit, [&](CUstream) { return pc.cu.cuStreamSynchronize(nullptr); });
}

TEST(unsafe_calls_spoil_a_capture) {
  const Computer pc;
  const auto refused = CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED;
  const CUmemAllocationProp prop = pc.prop();
  CUmemGenericAllocationHandle handle = 0;
  CUdeviceptr pointer = 0;
  expect_spoilt(pc, refused, [&](CUstream) { return pc.cu.cuMemAlloc(&pointer, kChunk); });
  expect_spoilt(pc, refused,
                [&](CUstream) { return pc.cu.cuMemCreate(&handle, kChunk, &prop, 0); });
  std::vector<unsigned char> host(kMiB);
  expect_spoilt(pc, refused,
                [&](CUstream) { return pc.cu.cuMemHostRegister(host.data(), kMiB, 0); });
  CUevent event = nullptr;
  REQUIRE_OK(pc.cu.cuEventCreate(&event, 0));
  expect_spoilt(pc, refused, [&](CUstream) { return pc.cu.cuEventQuery(event); });
  expect_spoilt(pc, refused, [&](CUstream) { return pc.cu.cuEventSynchronize(event); });
  CHECK_OK(pc.cu.cuEventDestroy(event));
}

TEST(relaxed_thread_may_make_unsafe_calls_during_a_capture) {
  const Computer pc;
  const StreamOf mine(pc);
  CUevent event = nullptr;
  REQUIRE_OK(pc.cu.cuEventCreate(&event, 0));
  begin(pc, mine.stream);
  CUstreamCaptureMode mode = CU_STREAM_CAPTURE_MODE_RELAXED;
  REQUIRE_OK(pc.cu.cuThreadExchangeStreamCaptureMode(&mode));
  CHECK_EQ(mode, CU_STREAM_CAPTURE_MODE_GLOBAL);
  {
    const CUdeviceptr at = pc.reserve();
    const auto handle = pc.create();
    CHECK_OK(pc.cu.cuMemMap(at, kChunk, 0, handle, 0));
    CHECK_OK(pc.allow(at));
    CHECK_OK(pc.cu.cuMemUnmap(at, kChunk));
    CHECK_OK(pc.cu.cuMemRelease(handle));
    CHECK_OK(pc.cu.cuMemAddressFree(at, kChunk));
    CHECK_OK(pc.cu.cuEventSynchronize(event));
    CHECK_OK(pc.cu.cuEventQuery(event));
  }
  CHECK_OK(pc.cu.cuThreadExchangeStreamCaptureMode(&mode));
  CHECK_EQ(status_of(pc, mine.stream), CU_STREAM_CAPTURE_STATUS_ACTIVE);
  CHECK_OK(end(pc, mine.stream));
  CHECK_OK(pc.cu.cuEventDestroy(event));
}

TEST(another_threads_capture_matters_by_its_mode) {
  const Computer pc;
  const StreamOf mine(pc);
  std::size_t ran = 0;
  for (const auto mode : {CU_STREAM_CAPTURE_MODE_GLOBAL, CU_STREAM_CAPTURE_MODE_THREAD_LOCAL}) {
    REQUIRE_OK(pc.cu.cuStreamBeginCapture(mine.stream, mode));
    CUresult answer = CUDA_SUCCESS;
    std::thread([&] {
      CUdeviceptr pointer = 0;
      pc.cu.cuCtxPushCurrent(pc.context);
      answer = pc.cu.cuMemAlloc(&pointer, kChunk);
      if (answer == CUDA_SUCCESS) pc.cu.cuMemFree(pointer);
    }).join();
    const bool global = mode == CU_STREAM_CAPTURE_MODE_GLOBAL;
    CHECK_EQ(answer, global ? CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED : CUDA_SUCCESS);
    CHECK_EQ(end(pc, mine.stream), global ? CUDA_ERROR_STREAM_CAPTURE_INVALIDATED : CUDA_SUCCESS);
    ++ran;
  }
  CHECK_EQ(ran, 2u);
}

TEST(asking_whether_the_legacy_stream_captures_harms_nothing) {
  const Computer pc;
  const StreamOf mine(pc, CU_STREAM_DEFAULT);
  begin(pc, mine.stream);
  CUstreamCaptureStatus status = CU_STREAM_CAPTURE_STATUS_NONE;
  CHECK_EQ(pc.cu.cuStreamIsCapturing(nullptr, &status), CUDA_ERROR_STREAM_CAPTURE_IMPLICIT);
  CHECK_EQ(status_of(pc, mine.stream), CU_STREAM_CAPTURE_STATUS_ACTIVE);
  CHECK_OK(end(pc, mine.stream));
  CHECK_OK(pc.cu.cuStreamIsCapturing(nullptr, &status));
}

TEST(non_blocking_capture_leaves_the_legacy_stream_alone) {
  const Computer pc;
  const Chunk chunk(pc);
  const StreamOf mine(pc, CU_STREAM_NON_BLOCKING);
  begin(pc, mine.stream);
  CHECK_EQ(status_of(pc, nullptr), CU_STREAM_CAPTURE_STATUS_NONE);
  CHECK_OK(pc.cu.cuMemsetD8Async(chunk.pointer, 1, 16, nullptr));
  CHECK_OK(end(pc, mine.stream));
}

TEST(captured_event_cannot_be_asked_and_brings_streams_in) {
  const Computer pc;
  const StreamOf origin(pc);
  const StreamOf other(pc);
  CUevent event = nullptr;
  CUevent back = nullptr;
  REQUIRE_OK(pc.cu.cuEventCreate(&event, CU_EVENT_DISABLE_TIMING));
  REQUIRE_OK(pc.cu.cuEventCreate(&back, CU_EVENT_DISABLE_TIMING));
  begin(pc, origin.stream);
  REQUIRE_OK(pc.cu.cuEventRecord(event, origin.stream));
  REQUIRE_OK(pc.cu.cuStreamWaitEvent(other.stream, event, 0));
  CHECK_EQ(status_of(pc, other.stream), CU_STREAM_CAPTURE_STATUS_ACTIVE);
  REQUIRE_OK(pc.cu.cuEventRecord(back, other.stream));
  REQUIRE_OK(pc.cu.cuStreamWaitEvent(origin.stream, back, 0));
  CHECK_OK(end(pc, origin.stream));
  CHECK_EQ(status_of(pc, other.stream), CU_STREAM_CAPTURE_STATUS_NONE);
  begin(pc, origin.stream);
  REQUIRE_OK(pc.cu.cuEventRecord(event, origin.stream));
  CHECK_EQ(pc.cu.cuEventSynchronize(event), CUDA_ERROR_CAPTURED_EVENT);
  CHECK_EQ(end(pc, origin.stream), CUDA_ERROR_STREAM_CAPTURE_INVALIDATED);
  CHECK_OK(pc.cu.cuEventDestroy(event));
  CHECK_OK(pc.cu.cuEventDestroy(back));
}

TEST(capture_begins_and_ends_properly_or_not_at_all) {
  const Computer pc;
  const StreamOf mine(pc);
  CHECK_EQ(pc.cu.cuStreamBeginCapture(nullptr, CU_STREAM_CAPTURE_MODE_GLOBAL),
           CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED);
  CHECK_EQ(end(pc, mine.stream), CUDA_ERROR_ILLEGAL_STATE);
  begin(pc, mine.stream);
  CHECK_EQ(pc.cu.cuStreamBeginCapture(mine.stream, CU_STREAM_CAPTURE_MODE_GLOBAL),
           CUDA_ERROR_ILLEGAL_STATE);
  CUresult answer = CUDA_SUCCESS;
  std::thread([&] { answer = end(pc, mine.stream); }).join();
  CHECK_EQ(answer, CUDA_ERROR_STREAM_CAPTURE_WRONG_THREAD);
  end(pc, mine.stream);
}

}  // namespace
