// Which driver calls do tests make fail, one by one, and how?
#pragma once

#include <functional>
#include <iterator>
#include <memory>
#include <vector>

#include "core_rig.h"

namespace rig {

// Every call of the table that malloc, free, a sleep, a wake or a switch may make. The
// ones that an operation does not make cost its test a scene each.
// clang-format off
inline const char* const kOperationCalls[] = {
    "cuCtxGetCurrent",
    "cuCtxPopCurrent",
    "cuCtxPushCurrent",
    "cuCtxSynchronize",
    "cuEventCreate",
    "cuEventDestroy",
    "cuEventQuery",
    "cuEventRecord",
    "cuEventSynchronize",
    "cuLaunchKernel",
    "cuMemAddressFree",
    "cuMemAddressReserve",
    "cuMemCreate",
    "cuMemGetInfo",
    "cuMemHostRegister",
    "cuMemHostUnregister",
    "cuMemMap",
    "cuMemRelease",
    "cuMemSetAccess",
    "cuMemUnmap",
    "cuMemcpyBatchAsync",
    "cuMemcpyDtoHAsync",
    "cuMemcpyHtoDAsync",
    "cuMemsetD8Async",
    "cuStreamCreate",
    "cuStreamDestroy",
    "cuStreamIsCapturing",
    "cuStreamSynchronize",
    "cuStreamWaitEvent",
    "cuThreadExchangeStreamCaptureMode",
};
// clang-format on

inline long calls_of(Rig& r, const char* call) {
  return r.computer.cu.cumem_emulator_call_count(r.computer.machine, call);
}

inline void fail_call(Rig& r, const char* call, long nth = 1, CUresult code = CUDA_ERROR_UNKNOWN) {
  REQUIRE(r.computer.cu.cumem_emulator_fail(r.computer.machine, call, nth, code) == 0);
}

// For each of `calls`, and every time that `operation` makes it in a scene of its own:
// operation with that one failing, then `after`.
template <class Scene>
void for_each_failure(const std::vector<const char*>& calls,
                      const std::function<std::unique_ptr<Scene>()>& make,
                      const std::function<void(Scene&)>& operation,
                      const std::function<void(Scene&, const char* call, long nth)>& after) {
  for (const char* call : calls) {
    std::unique_ptr<Scene> counted = make();
    const long before = calls_of(counted->r, call);
    operation(*counted);
    const long made = calls_of(counted->r, call) - before;
    for (long nth = 1; nth <= made; ++nth) {
      std::unique_ptr<Scene> scene = make();
      fail_call(scene->r, call, nth);
      operation(*scene);
      scene->r.computer.cu.cumem_emulator_clear(scene->r.computer.machine);
      after(*scene, call, nth);
    }
  }
}

// The same for every call.
template <class Scene>
void for_each_failure(const std::function<std::unique_ptr<Scene>()>& make,
                      const std::function<void(Scene&)>& operation,
                      const std::function<void(Scene&, const char* call, long nth)>& after) {
  const std::vector<const char*> calls(std::begin(kOperationCalls), std::end(kOperationCalls));
  for_each_failure<Scene>(calls, make, operation, after);
}

}  // namespace rig
