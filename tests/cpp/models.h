// What do tests of several segments with known bytes work with?
#pragma once

#include <functional>
#include <utility>
#include <vector>

#include "core_rig.h"

namespace rig {

using cumem::SwitchRequest;
using cumem::SwitchResult;

// Every call of the table that a sleep, a wake or a switch may make.
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
    "cuMemCreate",
    "cuMemGetInfo",
    "cuMemHostRegister",
    "cuMemHostUnregister",
    "cuMemMap",
    "cuMemRelease",
    "cuMemSetAccess",
    "cuMemUnmap",
    "cuMemcpyDtoHAsync",
    "cuMemcpyHtoDAsync",
    "cuMemsetD8Async",
    "cuStreamCreate",
    "cuStreamIsCapturing",
    "cuStreamWaitEvent",
    "cuThreadExchangeStreamCaptureMode",
};
// clang-format on

// A segment and the bytes that are to be in it.
struct Part {
  Part(Rig& r, std::size_t bytes, unsigned seed, int device = 0)
      : at(r.make(bytes, "weights", device)), data(Rig::pattern(bytes, seed)) {
    r.write(at, data);
  }
  SegmentPlan plan() const { return Rig::whole(at, data.size()); }
  bool intact(Rig& r) const { return r.read(at, data.size()) == data; }
  void change(Rig& r, std::size_t offset) {
    data[offset] ^= 0x20;
    r.write(at + offset, {data[offset]});
  }

  CUdeviceptr at;
  std::vector<unsigned char> data;
};

class Model {
 public:
  Model(Rig& r, const std::vector<std::size_t>& sizes, unsigned seed, int device = 0) : rig_(r) {
    for (std::size_t bytes : sizes) parts.emplace_back(r, bytes, seed++, device);
  }
  std::vector<SegmentPlan> plans() const {
    std::vector<SegmentPlan> made;
    for (const Part& part : parts) made.push_back(part.plan());
    return made;
  }
  std::vector<CUdeviceptr> addresses() const {
    std::vector<CUdeviceptr> made;
    for (const Part& part : parts) made.push_back(part.at);
    return made;
  }
  std::size_t bytes() const {
    std::size_t sum = 0;
    for (const Part& part : parts) sum += part.data.size();
    return sum;
  }
  Status sleep() const { return rig_.sleep(plans()); }
  Status wake() const { return rig_.wake(addresses()); }
  bool asleep() const { return count_asleep() == parts.size(); }
  bool awake() const { return count_asleep() == 0; }
  std::size_t count_asleep() const {
    std::size_t count = 0;
    for (const Part& part : parts) count += rig_.asleep(part.at) ? 1 : 0;
    return count;
  }
  // Whatever is awake has its bytes.
  void expect_bytes() const {
    for (const Part& part : parts) CHECK(rig_.asleep(part.at) || part.intact(rig_));
  }
  void free() const {
    for (const Part& part : parts) rig_.allocator->free(part.at);
  }

  std::vector<Part> parts;

 private:
  Rig& rig_;
};

inline SwitchRequest switch_of(std::vector<SegmentPlan> leaving,
                               std::vector<CUdeviceptr> arriving) {
  SwitchRequest request;
  request.sleep.segments = std::move(leaving);
  request.wake.segments = std::move(arriving);
  return request;
}

inline Status change_places(Rig& r, const Model& leaving, const Model& arriving,
                            SwitchResult* out = nullptr) {
  SwitchResult result;
  Status status = r.allocator->exchange(switch_of(leaving.plans(), arriving.addresses()), result);
  if (out != nullptr) *out = std::move(result);
  return status;
}

inline long calls_of(Rig& r, const char* call) {
  return r.computer.cu.cumem_emulator_call_count(r.computer.machine, call);
}

inline void fail_call(Rig& r, const char* call, long nth = 1, CUresult code = CUDA_ERROR_UNKNOWN) {
  REQUIRE(r.computer.cu.cumem_emulator_fail(r.computer.machine, call, nth, code) == 0);
}

// For every call, and every time that `operation` makes it in a scene of its own:
// operation with that one failing, then `after`.
template <class Scene>
void for_each_failure(const std::function<std::unique_ptr<Scene>()>& make,
                      const std::function<void(Scene&)>& operation,
                      const std::function<void(Scene&, const char* call, long nth)>& after) {
  for (const char* call : kOperationCalls) {
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

}  // namespace rig
