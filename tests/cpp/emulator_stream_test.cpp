// Does the emulated driver run work late, in order, and as streams and events demand?

#include <algorithm>
#include <chrono>
#include <thread>

#include "computer.h"

namespace {

TEST(copies_to_pinned_memory_are_done_after_the_wait) {
  const Computer pc;
  const Chunk chunk(pc);
  const auto written = pattern(kChunk, 4);
  REQUIRE_OK(pc.cu.cuMemcpyHtoD(chunk.pointer, written.data(), kChunk));
  const StreamOf mine(pc);
  PinnedBytes target(pc, kChunk);
  REQUIRE_OK(pc.cu.cuMemcpyDtoHAsync(target.bytes.data(), chunk.pointer, kChunk, mine.stream));
  CHECK_OK(pc.cu.cuStreamSynchronize(mine.stream));
  CHECK(target.bytes == written);
}

TEST(missing_wait_is_seen) {
  const Computer pc;
  pc.need_control();
  const Chunk chunk(pc);
  const StreamOf mine(pc);
  pc.cu.cumem_emulator_set_latency(pc.machine, 50000);
  REQUIRE_OK(pc.cu.cuMemsetD8Async(chunk.pointer, 0, kChunk, mine.stream));
  CHECK_EQ(pc.cu.cuStreamQuery(mine.stream), CUDA_ERROR_NOT_READY);
  CHECK(pc.ledger().pending_work > 0);
  CHECK_OK(pc.cu.cuStreamSynchronize(mine.stream));
  CHECK_OK(pc.cu.cuStreamQuery(mine.stream));
  CHECK_EQ(pc.ledger().pending_work, 0u);
}

TEST(pinned_source_is_read_late_and_pageable_source_at_the_call) {
  const Computer pc;
  pc.need_control();
  pc.cu.cumem_emulator_set_latency(pc.machine, 50000);
  const Chunk chunk(pc);
  const StreamOf mine(pc);
  PinnedBytes pinned(pc, 4096);
  std::vector<unsigned char> pageable(4096, 1);
  pinned.bytes.assign(4096, 1);
  REQUIRE_OK(pc.cu.cuMemcpyHtoDAsync(chunk.pointer, pageable.data(), 4096, mine.stream));
  REQUIRE_OK(pc.cu.cuMemcpyHtoDAsync(chunk.pointer + 4096, pinned.bytes.data(), 4096, mine.stream));
  pageable.assign(4096, 2);
  std::fill(pinned.bytes.begin(), pinned.bytes.end(), static_cast<unsigned char>(2));
  CHECK_OK(pc.cu.cuStreamSynchronize(mine.stream));
  const auto seen = chunk.contents();
  CHECK_EQ(int{seen[0]}, 1);
  CHECK_EQ(int{seen[4096]}, 2);
}

TEST(pageable_target_is_written_at_return) {
  const Computer pc;
  const Chunk chunk(pc);
  const auto written = pattern(kChunk, 5);
  const StreamOf mine(pc);
  REQUIRE_OK(pc.cu.cuMemcpyHtoDAsync(chunk.pointer, written.data(), kChunk, mine.stream));
  std::vector<unsigned char> seen(kChunk);
  REQUIRE_OK(pc.cu.cuMemcpyDtoHAsync(seen.data(), chunk.pointer, kChunk, mine.stream));
  CHECK_OK(pc.cu.cuStreamSynchronize(mine.stream));
  CHECK(seen == written);
}

TEST(copy_across_the_edge_of_pinned_memory_is_refused) {
  const Computer pc;
  const Chunk chunk(pc);
  std::vector<unsigned char> host(kChunk);
  REQUIRE_OK(pc.cu.cuMemHostRegister(host.data(), kMiB, 0));
  CHECK_EQ(pc.cu.cuMemcpyDtoHAsync(host.data(), chunk.pointer, kChunk, nullptr),
           CUDA_ERROR_INVALID_VALUE);
  CHECK_OK(pc.cu.cuMemHostUnregister(host.data()));
}

TEST(event_orders_two_streams) {
  const Computer pc;
  pc.need_control();
  const Chunk chunk(pc);
  const StreamOf writer(pc);
  const StreamOf reader(pc);
  CUevent written = nullptr;
  REQUIRE_OK(pc.cu.cuEventCreate(&written, CU_EVENT_DISABLE_TIMING));
  CHECK_OK(pc.cu.cuEventQuery(written));
  const auto bytes = pattern(kChunk, 6);
  CHECK_EQ(pc.cu.cumem_emulator_enqueue_write(pc.machine, writer.stream, chunk.pointer,
                                              bytes.data(), kChunk, 30000),
           0);
  REQUIRE_OK(pc.cu.cuEventRecord(written, writer.stream));
  CHECK_EQ(pc.cu.cuEventQuery(written), CUDA_ERROR_NOT_READY);
  REQUIRE_OK(pc.cu.cuStreamWaitEvent(reader.stream, written, 0));
  std::vector<unsigned char> seen(kChunk);
  CHECK_EQ(pc.cu.cumem_emulator_enqueue_read(pc.machine, reader.stream, chunk.pointer, seen.data(),
                                             kChunk, 0),
           0);
  CHECK_OK(pc.cu.cuStreamSynchronize(reader.stream));
  CHECK(seen == bytes);
  CHECK_OK(pc.cu.cuEventSynchronize(written));
  CHECK_OK(pc.cu.cuEventDestroy(written));
  CHECK_EQ(pc.cu.cuEventQuery(written), CUDA_ERROR_INVALID_HANDLE);
}

TEST(legacy_stream_waits_for_blocking_streams_only) {
  const Computer pc;
  pc.need_control();
  const StreamOf blocking(pc, CU_STREAM_DEFAULT);
  const StreamOf apart(pc, CU_STREAM_NON_BLOCKING);
  const Chunk chunk(pc);
  CHECK_EQ(pc.cu.cumem_emulator_enqueue_delay(pc.machine, apart.stream, 300000), 0);
  REQUIRE_OK(pc.cu.cuMemsetD8Async(chunk.pointer, 7, 16, nullptr));
  CHECK_OK(pc.cu.cuStreamSynchronize(nullptr));
  CHECK_EQ(pc.cu.cuStreamQuery(apart.stream), CUDA_ERROR_NOT_READY);
  CHECK_EQ(pc.cu.cumem_emulator_enqueue_delay(pc.machine, blocking.stream, 30000), 0);
  CHECK_EQ(pc.cu.cuStreamQuery(nullptr), CUDA_ERROR_NOT_READY);
  REQUIRE_OK(pc.cu.cuMemsetD8Async(chunk.pointer, 8, 16, nullptr));
  CHECK_OK(pc.cu.cuStreamSynchronize(nullptr));
  CHECK_OK(pc.cu.cuStreamQuery(blocking.stream));
  CHECK_OK(pc.cu.cuCtxSynchronize());
  CHECK_OK(pc.cu.cuStreamQuery(apart.stream));
}

TEST(destroyed_stream_finishes_its_work) {
  const Computer pc;
  pc.need_control();
  const Chunk chunk(pc);
  const auto bytes = pattern(64, 7);
  CUstream stream = nullptr;
  REQUIRE_OK(pc.cu.cuStreamCreate(&stream, CU_STREAM_NON_BLOCKING));
  CHECK_EQ(pc.cu.cumem_emulator_enqueue_write(pc.machine, stream, chunk.pointer, bytes.data(), 64,
                                              20000),
           0);
  CHECK_OK(pc.cu.cuStreamDestroy(stream));
  CHECK_EQ(pc.cu.cuStreamSynchronize(stream), CUDA_ERROR_INVALID_HANDLE);
  CHECK_OK(pc.cu.cuCtxSynchronize());
  const auto seen = chunk.contents();
  CHECK(std::equal(bytes.begin(), bytes.end(), seen.begin()));
}

TEST(unmapping_under_a_running_copy_kills_the_context) {
  const Computer pc;
  pc.need_control();
  const CUdeviceptr at = pc.reserve(8 * kMiB);
  const auto handle = pc.create(8 * kMiB);
  REQUIRE_OK(pc.cu.cuMemMap(at, 8 * kMiB, 0, handle, 0));
  REQUIRE_OK(pc.allow(at, 8 * kMiB));
  PinnedBytes host(pc, 8 * kMiB);
  pc.cu.cumem_emulator_set_bandwidth(pc.machine, 100 * kMiB);
  REQUIRE_OK(pc.cu.cuMemcpyDtoHAsync(host.bytes.data(), at, 8 * kMiB, nullptr));
  std::this_thread::sleep_for(std::chrono::milliseconds(20));
  CHECK_OK(pc.cu.cuMemUnmap(at, 8 * kMiB));
  CHECK_EQ(pc.cu.cuCtxSynchronize(), CUDA_ERROR_ILLEGAL_ADDRESS);
  CHECK_EQ(pc.cu.cuStreamSynchronize(nullptr), CUDA_ERROR_ILLEGAL_ADDRESS);
  CHECK_EQ(pc.ledger().dead_contexts, 1u);
  CHECK_EQ(pc.cu.cumem_emulator_poison(pc.machine, 0, 0), 0);
  CHECK_OK(pc.cu.cuMemRelease(handle));
  CHECK_OK(pc.cu.cuMemAddressFree(at, 8 * kMiB));
}

}  // namespace
