// What does one emulated computer consist of?
//
// Machines, devices and contexts are made once and live as long as the process,
// so that a plain pointer to one is always good. Their memory is not: see
// backing.h. Fields change under World::mutex only.
#pragma once

#include <cstddef>
#include <cstdint>
#include <limits>
#include <map>
#include <memory>
#include <optional>
#include <vector>

#include "emulator/backing.h"
#include "emulator/driver_api.h"
#include "emulator/faults.h"

namespace cumem::emulator {

struct Device;
struct Machine;
struct Stream;

// The primary context of a device.
struct Context {
  Device& device;
  CUcontext id;
  int retains = 0;
  bool pinned = false;             // a runtime keeps it active
  CUresult death = CUDA_SUCCESS;   // the sticky error
  std::shared_ptr<Stream> legacy;  // also in `streams`
  // Created and not destroyed, or destroyed with work left.
  std::vector<std::shared_ptr<Stream>> streams;

  Context(Device& owner, CUcontext handle) : device(owner), id(handle) {}
  bool active() const { return pinned || retains > 0; }
  bool dead() const { return death != CUDA_SUCCESS; }
};

struct Device {
  Machine& machine;
  int ordinal;
  Backing backing;
  Context context;

  Device(Machine& owner, int index, std::size_t capacity, CUcontext id)
      : machine(owner), ordinal(index), backing(capacity), context(*this, id) {}

  CUdevice value() const;
};

struct Machine {
  int index;
  std::vector<std::unique_ptr<Device>> devices;
  Faults faults;
  std::map<int, int> attributes;  // overrides; -1: unknown
  std::uint64_t bandwidth = 0;
  std::uint64_t latency_us = 200;
  std::uint64_t host_limit = std::numeric_limits<std::uint64_t>::max();
  bool refuses_host_memory = false;

  // What cuDeviceGetAttribute says; nothing for an unknown attribute.
  std::optional<int> attribute(int which) const;
};

constexpr int kDevicesAtMost = 64;

}  // namespace cumem::emulator
