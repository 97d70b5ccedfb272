// What does a test of the core stand on? An allocator over a fresh emulated
// machine, and ways to write and read device memory behind its back.
#pragma once

#include <cstdint>
#include <cstring>
#include <map>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "check.h"
#include "computer.h"
#include "core/allocator.h"

namespace rig {

using cumem::Allocator;
using cumem::CleanCheck;
using cumem::Config;
using cumem::Owner;
using cumem::Range;
using cumem::SegmentInfo;
using cumem::SegmentPlan;
using cumem::SleepRequest;
using cumem::SleepResult;
using cumem::Status;
using cumem::WakeRequest;
using cumem::WakeResult;

inline std::string library_path() {
  const char* const variable = std::getenv("CUMEM_TEST_EMULATOR");
  const std::string& argument = check::Registry::instance().argument;
  return !argument.empty() || variable == nullptr ? argument : variable;
}

inline constexpr char kDigestImage[] = "cumem emulated digest";

inline Config small_chunks() {
  Config config;
  config.chunk_bytes = kChunk;
  config.host.piece_bytes = 3 * kMiB;  // so that a backup spans pieces
  config.host.touch_threads = 2;
  return config;
}

class Rig {
 public:
  explicit Rig(std::uint64_t capacity = 64 * kMiB, Config config = small_chunks(), int devices = 1)
      : computer(capacity, devices), copy_streams(2 * static_cast<std::uint64_t>(devices)) {
    computer.need_control();
    std::unique_ptr<cumem::Driver> loaded;
    std::string detail;
    REQUIRE(cumem::Driver::load(library_path(), loaded, detail).ok());
    driver = std::move(loaded);
    allocator = std::make_unique<Allocator>(driver, config);
    for (int ordinal = 0; ordinal < devices; ++ordinal) {
      cumem::Device* device = nullptr;
      REQUIRE(allocator->device(ordinal, &device).ok());
    }
    start = computer.ledger();
  }

  CUdeviceptr make(std::size_t bytes, const std::string& tag = "weights", int device = 0) {
    CUdeviceptr address = 0;
    REQUIRE(
        allocator->malloc(bytes, device, nullptr, Owner{tag, "offload", 1, false}, address).ok());
    return address;
  }
  // Position-dependent bytes, different for each seed.
  // Made once a size and seed: thousands of scenes hold the same bytes.
  static const std::vector<unsigned char>& pattern(std::size_t bytes, unsigned seed) {
    static std::map<std::pair<std::size_t, unsigned>, std::vector<unsigned char>> made;
    std::vector<unsigned char>& data = made[{bytes, seed}];
    std::uint32_t state = seed * 2654435761U + 1;
    while (data.size() < bytes) {
      state = state * 1664525U + 1013904223U;
      data.push_back(static_cast<unsigned char>(state >> 24));
    }
    return data;
  }
  void write(CUdeviceptr at, const std::vector<unsigned char>& data) {
    REQUIRE_OK(computer.cu.cuMemcpyHtoD(at, data.data(), data.size()));
  }
  std::vector<unsigned char> read(CUdeviceptr at, std::size_t bytes) {
    std::vector<unsigned char> data(bytes);
    REQUIRE_OK(computer.cu.cuMemcpyDtoH(data.data(), at, bytes));
    return data;
  }
  SegmentInfo info(CUdeviceptr address) {
    for (const SegmentInfo& segment : allocator->segments())
      if (segment.address == address) return segment;
    return {};
  }
  static SegmentPlan whole(CUdeviceptr address, std::size_t bytes) {
    return {address, {{address, bytes}}};
  }
  // Gives a device its kernel; what the digester holds counts as there from the start.
  void load_digester(int device = 0) {
    REQUIRE(allocator->load_digester(device, kDigestImage).ok());
    start.host_registrations += 1;
    start.streams += 1;
  }
  Status sleep(std::vector<SegmentPlan> plans, CleanCheck check = CleanCheck::digest) {
    slept = {};
    SleepRequest request;
    request.segments = std::move(plans);
    request.clean_check = check;
    return allocator->sleep(request, slept);
  }
  Status wake(std::vector<CUdeviceptr> segments, std::optional<unsigned char> fill = {}) {
    woken = {};
    WakeRequest request;
    request.segments = std::move(segments);
    request.fill = fill;
    return allocator->wake(request, woken);
  }
  // Nothing of the allocator's is left on the machine but pinned host memory.
  void expect_empty() {
    const cumem_emulator_ledger_t now = computer.ledger();
    CHECK_EQ(now.handles, start.handles);
    CHECK_EQ(now.mappings, start.mappings);
    CHECK_EQ(now.reservations, start.reservations);
    CHECK_EQ(now.handle_references, start.handle_references);
    CHECK(now.streams <= start.streams + copy_streams);
    allocator->host().release_idle();
    CHECK_EQ(computer.ledger().host_registrations, start.host_registrations);
  }
  bool asleep(CUdeviceptr address) { return info(address).state == cumem::SegmentState::asleep; }

  Computer computer;
  std::shared_ptr<cumem::Driver> driver;
  std::unique_ptr<Allocator> allocator;
  const std::uint64_t copy_streams;  // stay with their device: one for each direction
  cumem_emulator_ledger_t start{};
  SleepResult slept;
  WakeResult woken;
};

}  // namespace rig
