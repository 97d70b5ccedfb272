// What do tests of several segments with known bytes work with?
#pragma once

#include <utility>
#include <vector>

#include "core_rig.h"

namespace rig {

using cumem::SwitchRequest;
using cumem::SwitchResult;

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

}  // namespace rig
