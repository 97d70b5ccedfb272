// Does the emulated driver load modules and take launches by the driver's rules?

#include "digest_kernel.h"

namespace {

TEST(only_the_digest_image_loads_and_only_its_function_is_found) {
  const Emulated pc;
  CUmodule module = nullptr;
  CUfunction function = nullptr;
  CHECK_EQ(pc.cu.cuModuleLoadData(&module,
                                  "\x7f"
                                  "ELF"),
           CUDA_ERROR_INVALID_IMAGE);
  CHECK_EQ(pc.cu.cuModuleLoadData(&module, "cumem emulated"), CUDA_ERROR_INVALID_IMAGE);
  CHECK_EQ(pc.cu.cuModuleLoadData(&module, nullptr), CUDA_ERROR_INVALID_VALUE);
  CHECK_EQ(pc.ledger().modules, 0u);
  REQUIRE_OK(pc.cu.cuModuleLoadData(&module, kImage));
  CHECK_EQ(pc.ledger().modules, 1u);
  CHECK_EQ(pc.cu.cuModuleGetFunction(&function, module, "other"), CUDA_ERROR_NOT_FOUND);
  CHECK_OK(pc.cu.cuModuleGetFunction(&function, module, "cumem_digest"));
  CHECK_OK(pc.cu.cuModuleUnload(module));
  CHECK_EQ(pc.cu.cuModuleUnload(module), CUDA_ERROR_INVALID_HANDLE);
  CHECK_EQ(pc.cu.cuModuleGetFunction(&function, module, "cumem_digest"), CUDA_ERROR_INVALID_HANDLE);
  DigestPiece* none = nullptr;
  void* arguments[] = {&none, &none};
  CHECK_EQ(pc.cu.cuLaunchKernel(function, 1, 1, 1, 512, 1, 1, 0, nullptr, arguments, nullptr),
           CUDA_ERROR_INVALID_HANDLE);
  CHECK_EQ(pc.ledger().modules, 0u);
}

TEST(a_launch_whose_module_is_gone_kills_the_context) {
  const Emulated pc;
  const Chunk chunk(pc);
  Batch batch(pc, {{chunk.pointer, 16}});
  pc.cu.cumem_emulator_set_latency(pc.machine, 20000);
  {
    const Kernel kernel(pc);
    CHECK_OK(batch.launch(kernel, nullptr));
  }
  CHECK_EQ(pc.cu.cuCtxSynchronize(), CUDA_ERROR_LAUNCH_FAILED);
  revive(pc);
}

TEST(a_launch_in_a_capture_is_recorded_and_not_run) {
  const Emulated pc;
  const Chunk chunk(pc);
  const Kernel kernel(pc);
  const StreamOf mine(pc);
  Batch batch(pc, {{chunk.pointer, kChunk}});
  CUgraph graph = nullptr;
  REQUIRE_OK(pc.cu.cuStreamBeginCapture(mine.stream, CU_STREAM_CAPTURE_MODE_GLOBAL));
  CHECK_OK(batch.launch(kernel, mine.stream));
  CHECK_OK(pc.cu.cuStreamEndCapture(mine.stream, &graph));
  CHECK_OK(pc.cu.cuCtxSynchronize());
  CHECK(batch.digests[0] == Digest{});
}

TEST(loading_and_unloading_a_module_spoil_a_capture) {
  const Emulated pc;
  const Kernel kernel(pc);
  const StreamOf mine(pc);
  CUgraph graph = nullptr;
  CUmodule module = nullptr;
  for (const bool load : {true, false}) {
    REQUIRE_OK(pc.cu.cuStreamBeginCapture(mine.stream, CU_STREAM_CAPTURE_MODE_GLOBAL));
    CHECK_EQ(load ? pc.cu.cuModuleLoadData(&module, kImage) : pc.cu.cuModuleUnload(kernel.module),
             CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED);
    CHECK_EQ(pc.cu.cuStreamEndCapture(mine.stream, &graph), CUDA_ERROR_STREAM_CAPTURE_INVALIDATED);
  }
}

TEST(a_launch_that_is_no_use_of_the_kernel_is_refused) {
  const Emulated pc(64 * kMiB, 2);
  const Kernel kernel(pc);
  const Chunk chunk(pc);
  Batch batch(pc, {{chunk.pointer, 16}});
  DigestPiece* pieces = batch.pieces.data();
  Digest* digests = batch.digests.data();
  void* arguments[] = {&pieces, &digests};
  const auto launch = [&](unsigned grid, unsigned block, void** given, void** extra) {
    return pc.cu.cuLaunchKernel(kernel.function, grid, 1, 1, block, 1, 1, 0, nullptr, given, extra);
  };
  CHECK_EQ(launch(0, 512, arguments, nullptr), CUDA_ERROR_INVALID_VALUE);
  CHECK_EQ(launch(1, 1024, arguments, nullptr), CUDA_ERROR_INVALID_VALUE);
  CHECK_EQ(launch(1, 256, arguments, nullptr), CUDA_ERROR_INVALID_VALUE);
  CHECK_EQ(launch(1, 512, nullptr, nullptr), CUDA_ERROR_INVALID_VALUE);
  CHECK_EQ(launch(1, 512, arguments, arguments), CUDA_ERROR_INVALID_VALUE);
  CUcontext second = nullptr;
  REQUIRE_OK(pc.cu.cuDevicePrimaryCtxRetain(&second, pc.device + 1));
  REQUIRE_OK(pc.cu.cuCtxPushCurrent(second));
  CHECK_EQ(launch(1, 512, arguments, nullptr), CUDA_ERROR_INVALID_HANDLE);
  CHECK_OK(pc.cu.cuCtxPopCurrent(&second));
  CHECK_OK(pc.cu.cuDevicePrimaryCtxRelease(pc.device + 1));
  CHECK_OK(pc.cu.cuCtxSynchronize());
  CHECK(batch.digests[0] == Digest{});
}

TEST(a_launch_can_be_made_to_fail) {
  const Emulated pc;
  const Chunk chunk(pc);
  const Kernel kernel(pc);
  Batch batch(pc, {{chunk.pointer, kChunk}});
  CHECK_EQ(pc.cu.cumem_emulator_fail(pc.machine, "cuLaunchKernel", 1, CUDA_ERROR_UNKNOWN), 0);
  CHECK_EQ(batch.launch(kernel, nullptr), CUDA_ERROR_UNKNOWN);
  CHECK_OK(pc.cu.cuCtxSynchronize());
  CHECK(batch.digests[0] == Digest{});
  CHECK_OK(batch.launch(kernel, nullptr));
  CHECK_OK(pc.cu.cuCtxSynchronize());
  CHECK(batch.digests[0] != Digest{});
}

TEST(modules_go_with_their_context) {
  const Emulated pc;
  CUmodule module = nullptr;
  REQUIRE_OK(pc.cu.cuModuleLoadData(&module, kImage));
  CHECK_OK(pc.cu.cuDevicePrimaryCtxRelease(pc.device));
  CHECK_EQ(pc.ledger().modules, 0u);
  CUcontext again = nullptr;
  CHECK_OK(pc.cu.cuDevicePrimaryCtxRetain(&again, pc.device));
  CHECK_EQ(pc.cu.cuModuleUnload(module), CUDA_ERROR_INVALID_HANDLE);
}

}  // namespace
