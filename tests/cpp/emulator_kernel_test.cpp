// Does the emulated driver run its one kernel as a device would?

#include <chrono>
#include <thread>

#include "digest_kernel.h"

namespace {

TEST(every_piece_gets_its_digest) {
  const Emulated pc;
  const Chunk chunk(pc);
  const Kernel kernel(pc);
  const auto data = pattern(kChunk, 1);
  REQUIRE_OK(pc.cu.cuMemcpyHtoD(chunk.pointer, data.data(), kChunk));
  Batch batch(pc, {{chunk.pointer, kChunk},
                   {chunk.pointer + 16, 1},
                   {chunk.pointer + 32, 0},
                   {chunk.pointer + kMiB, kMiB - 3}});
  CHECK_OK(batch.launch(kernel, nullptr));
  CHECK_OK(pc.cu.cuStreamSynchronize(nullptr));
  CHECK(batch.digests[0] == digest_of(data.data(), kChunk));
  CHECK(batch.digests[1] == digest_of(data.data() + 16, 1));
  CHECK(batch.digests[2] == Digest{});
  CHECK(batch.digests[3] == digest_of(data.data() + kMiB, kMiB - 3));
}

TEST(a_launch_runs_late_and_reads_its_list_then) {
  const Emulated pc;
  const Chunk chunk(pc);
  const Kernel kernel(pc);
  const StreamOf mine(pc);
  const auto data = pattern(kChunk, 2);
  REQUIRE_OK(pc.cu.cuMemcpyHtoD(chunk.pointer, data.data(), kChunk));
  pc.cu.cumem_emulator_set_latency(pc.machine, 50000);
  Batch batch(pc, {{chunk.pointer, 64}});
  CHECK_OK(batch.launch(kernel, mine.stream));
  CHECK_EQ(pc.cu.cuStreamQuery(mine.stream), CUDA_ERROR_NOT_READY);
  CHECK(batch.digests[0] == Digest{});
  batch.pieces[0] = {chunk.pointer + 4096, 128};
  CHECK_OK(pc.cu.cuStreamSynchronize(mine.stream));
  CHECK(batch.digests[0] == digest_of(data.data() + 4096, 128));
}

TEST(a_launch_keeps_its_place_in_the_stream) {
  const Emulated pc;
  const Chunk chunk(pc);
  const Kernel kernel(pc);
  const StreamOf mine(pc);
  Batch first(pc, {{chunk.pointer, kMiB}});
  Batch second(pc, {{chunk.pointer, kMiB}});
  const auto before = pattern(kMiB, 3);
  const auto after = pattern(kMiB, 4);
  const auto write = [&](const std::vector<unsigned char>& data) {
    CHECK_EQ(pc.cu.cumem_emulator_enqueue_write(pc.machine, mine.stream, chunk.pointer, data.data(),
                                                kMiB, 10000),
             0);
  };
  write(before);
  CHECK_OK(first.launch(kernel, mine.stream));
  write(after);
  CHECK_OK(second.launch(kernel, mine.stream));
  CHECK_OK(pc.cu.cuStreamSynchronize(mine.stream));
  CHECK(first.digests[0] == digest_of(before.data(), kMiB));
  CHECK(second.digests[0] == digest_of(after.data(), kMiB));
}

TEST(memory_that_cannot_be_digested_kills_the_context) {
  const Emulated pc;
  const Chunk chunk(pc);
  const Kernel kernel(pc);
  const CUdeviceptr bare = pc.reserve();
  const auto handle = pc.create();
  REQUIRE_OK(pc.cu.cuMemMap(bare, kChunk, 0, handle, 0));  // mapped, without access
  const std::vector<std::pair<DigestPiece, CUresult>> bad = {
      {{bare, 16}, CUDA_ERROR_ILLEGAL_ADDRESS},
      {{chunk.pointer, kChunk + 1}, CUDA_ERROR_ILLEGAL_ADDRESS},
      {{16, 16}, CUDA_ERROR_ILLEGAL_ADDRESS},
      {{chunk.pointer + 8, 16}, CUDA_ERROR_MISALIGNED_ADDRESS}};
  for (const auto& [piece, death] : bad) {
    Batch batch(pc, {{chunk.pointer, 16}, piece});
    CHECK_OK(batch.launch(kernel, nullptr));
    CHECK_EQ(pc.cu.cuStreamSynchronize(nullptr), death);
    CHECK_EQ(batch.launch(kernel, nullptr), death);
    revive(pc);
  }
  CHECK_OK(pc.cu.cuMemUnmap(bare, kChunk));
  CHECK_OK(pc.cu.cuMemRelease(handle));
  CHECK_OK(pc.cu.cuMemAddressFree(bare, kChunk));
}

TEST(host_memory_that_is_not_registered_kills_the_context) {
  const Emulated pc;
  const Chunk chunk(pc);
  const Kernel kernel(pc);
  Batch pinned(pc, {{chunk.pointer, 16}});
  std::vector<DigestPiece> pieces = pinned.pieces;
  std::vector<Digest> digests(1);
  CHECK_OK(kernel.launch(nullptr, 1, pieces.data(), pinned.digests.data()));
  CHECK_EQ(pc.cu.cuCtxSynchronize(), CUDA_ERROR_ILLEGAL_ADDRESS);
  revive(pc);
  CHECK_OK(kernel.launch(nullptr, 1, pinned.pieces.data(), digests.data()));
  CHECK_EQ(pc.cu.cuCtxSynchronize(), CUDA_ERROR_ILLEGAL_ADDRESS);
  revive(pc);
  CHECK(digests[0] == Digest{});
}

// Each of the tests below takes something away while the digests of eight chunks run.
template <class Theft>
void expect_found_out(CUresult death, const Theft& theft) {
  const Emulated pc;
  const CUdeviceptr at = pc.reserve(8 * kChunk);
  const auto handle = pc.create(8 * kChunk);
  REQUIRE_OK(pc.cu.cuMemMap(at, 8 * kChunk, 0, handle, 0));
  REQUIRE_OK(pc.allow(at, 8 * kChunk));
  std::vector<DigestPiece> pieces;
  for (std::size_t i = 0; i < 8; ++i) pieces.push_back({at + i * kChunk, kChunk});
  const Kernel kernel(pc);
  Batch batch(pc, pieces);
  pc.cu.cumem_emulator_set_bandwidth(pc.machine, 100 * kMiB);
  CHECK_OK(batch.launch(kernel, nullptr));
  std::this_thread::sleep_for(std::chrono::milliseconds(30));
  theft(pc, batch, at);
  CHECK_EQ(pc.cu.cuCtxSynchronize(), death);
  revive(pc);
  pc.cu.cuMemUnmap(at, 8 * kChunk);
  CHECK_OK(pc.cu.cuMemRelease(handle));
  CHECK_OK(pc.cu.cuMemAddressFree(at, 8 * kChunk));
}

TEST(unmapping_under_a_running_digest_kills_the_context) {
  expect_found_out(CUDA_ERROR_ILLEGAL_ADDRESS, [](const Computer& pc, Batch&, CUdeviceptr at) {
    CHECK_OK(pc.cu.cuMemUnmap(at, 8 * kChunk));
  });
}

TEST(unregistering_results_under_a_running_digest_kills_the_context) {
  expect_found_out(CUDA_ERROR_ILLEGAL_ADDRESS, [](const Computer& pc, Batch& batch, CUdeviceptr) {
    CHECK_OK(pc.cu.cuMemHostUnregister(batch.digests.data()));
  });
}

void churn(const Computer& pc, unsigned seed) {
  pc.cu.cuCtxPushCurrent(pc.context);
  const auto data = pattern(kChunk, seed);
  for (int round = 0; round < 5; ++round) {
    const Kernel kernel(pc);
    const StreamOf mine(pc);
    const Chunk chunk(pc);
    Batch batch(pc, {{chunk.pointer, kMiB}, {chunk.pointer + kMiB, kMiB}});
    CHECK_OK(pc.cu.cuMemcpyHtoDAsync(chunk.pointer, data.data(), kChunk, mine.stream));
    CHECK_OK(batch.launch(kernel, mine.stream));
    CHECK_OK(pc.cu.cuStreamSynchronize(mine.stream));
    CHECK(batch.digests[0] == digest_of(data.data(), kMiB));
    CHECK(batch.digests[1] == digest_of(data.data() + kMiB, kMiB));
  }
  pc.cu.cuCtxPopCurrent(nullptr);
}

TEST(threads_launch_at_once) {
  const Emulated pc;
  std::vector<std::thread> threads;
  for (unsigned seed = 0; seed < 4; ++seed) threads.emplace_back([&pc, seed] { churn(pc, seed); });
  for (std::thread& thread : threads) thread.join();
  CHECK_EQ(pc.ledger().modules + pc.ledger().streams, 0u);
}

}  // namespace
