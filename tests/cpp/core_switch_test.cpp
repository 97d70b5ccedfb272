// Do two sets of segments change places in the room of one, and is nothing lost?
#include <atomic>
#include <chrono>
#include <thread>

#include "failures.h"
#include "models.h"

namespace {

using cumem::Fault;
using cumem::Status;
using rig::change_places;
using rig::Model;
using rig::Rig;
using rig::SwitchResult;

// Two models on a device with room for one and a little: `in` sleeps, `out` is awake.
struct Pair {
  explicit Pair(std::vector<std::size_t> in_sizes = {2 * kChunk, kChunk, 3 * kChunk},
                std::vector<std::size_t> out_sizes = {3 * kChunk, 2 * kChunk, kChunk},
                std::uint64_t capacity = 7 * kChunk, rig::Config config = rig::small_chunks())
      : r(capacity, config), in(r, in_sizes, 1) {
    REQUIRE(in.sleep().ok());
    out.emplace(r, out_sizes, 50);
  }
  Status go(SwitchResult* result = nullptr) { return change_places(r, *out, in, result); }
  Status go_back(SwitchResult* result = nullptr) { return change_places(r, in, *out, result); }
  void expect_unchanged() {
    CHECK(in.asleep());
    CHECK(out->awake());
    out->expect_bytes();
    CHECK(r.allocator->verify().ok());
  }
  void expect_switched() {
    CHECK(in.awake());
    CHECK(out->asleep());
    in.expect_bytes();
    CHECK(r.allocator->verify().ok());
  }
  void end() {
    in.free();
    out->free();
    r.expect_empty();
  }

  Rig r;
  Model in;
  std::optional<Model> out;
};

TEST(two_models_change_places_in_the_room_of_one) {
  Pair pair;
  for (int round = 0; round < 3; ++round) {
    SwitchResult there;
    REQUIRE(pair.go(&there).ok());
    pair.expect_switched();
    CHECK(there.sleep.freed_bytes <= pair.out->bytes());  // the rest changed hands
    CHECK_EQ(pair.r.computer.ledger().handle_bytes, pair.in.bytes());
    CHECK_EQ(there.sleep.copied_bytes, pair.out->bytes());
    CHECK_EQ(there.sleep.segments.size(), std::size_t{3});
    CHECK_EQ(there.wake.mapped_bytes, pair.in.bytes());
    CHECK_EQ(there.wake.restored_bytes, pair.in.bytes());
    CHECK_EQ(there.wake.segments.size(), std::size_t{3});
    REQUIRE(pair.go_back().ok());
    pair.expect_unchanged();
    for (rig::Part& part : pair.out->parts) part.change(pair.r, 77);
  }
  pair.end();
}

TEST(a_switch_copies_only_what_changed) {
  Pair pair;
  pair.r.load_digester();
  SwitchResult result;
  REQUIRE(pair.go(&result).ok());
  CHECK(result.sleep.digested);
  CHECK_EQ(result.sleep.copied_bytes, pair.out->bytes());
  REQUIRE(pair.go_back(&result).ok());
  CHECK_EQ(result.sleep.copied_bytes, pair.in.bytes());  // its backup was made without digests
  REQUIRE(pair.go(&result).ok());
  CHECK_EQ(result.sleep.copied_bytes, std::size_t{0});
  pair.in.parts[2].change(pair.r, kChunk + 5);
  REQUIRE(pair.go_back(&result).ok());
  CHECK_EQ(result.sleep.copied_bytes, kChunk);
  pair.expect_unchanged();
  REQUIRE(pair.go().ok());
  pair.expect_switched();
  pair.end();
}

TEST(a_large_model_follows_a_small_one_and_a_small_one_a_large_one) {
  const std::vector<std::size_t> large(6, kChunk);
  const std::vector<std::size_t> small = {2 * kChunk};
  for (const bool grows : {true, false}) {
    Pair pair(grows ? large : small, grows ? small : large, 6 * kChunk);
    REQUIRE(pair.go().ok());
    pair.expect_switched();
    REQUIRE(pair.go_back().ok());
    pair.expect_unchanged();
    pair.end();
  }
}

// One allocation a segment, so that memory fits only a segment of the same size.
TEST(whoever_fits_the_memory_at_hand_arrives_first) {
  rig::Config config = rig::small_chunks();
  config.chunk_bytes = 8 * kChunk;
  Pair pair({kChunk, 2 * kChunk, 3 * kChunk, 4 * kChunk, 5 * kChunk, 6 * kChunk},
            {6 * kChunk, 5 * kChunk, 4 * kChunk, 3 * kChunk, 2 * kChunk, kChunk}, 28 * kChunk,
            config);
  SwitchResult result;
  REQUIRE(pair.go(&result).ok());
  pair.expect_switched();
  // The two smallest came into free room before anything left; all others changed hands.
  CHECK_EQ(result.sleep.freed_bytes, 3 * kChunk);
  pair.end();
}

TEST(a_switch_of_nothing_and_of_one_side_only) {
  Pair pair;
  const Model nothing(pair.r, {}, 1);
  REQUIRE(change_places(pair.r, nothing, nothing).ok());
  pair.expect_unchanged();
  REQUIRE(change_places(pair.r, *pair.out, nothing).ok());
  CHECK(pair.out->asleep() && pair.in.asleep());
  REQUIRE(change_places(pair.r, nothing, pair.in).ok());
  pair.expect_switched();
  SwitchResult again;
  REQUIRE(pair.go(&again).ok());
  CHECK(again.sleep.segments.empty() && again.wake.segments.empty());
  CHECK_EQ(again.sleep.copied_bytes + again.wake.restored_bytes, std::size_t{0});
  pair.end();
}

TEST(several_devices_switch_at_once) {
  Rig r(7 * kChunk, rig::small_chunks(), 3);
  std::vector<Model> in;
  std::vector<Model> out;
  rig::SwitchRequest there;
  for (int device = 0; device < 3; ++device) {
    in.emplace_back(r, std::vector<std::size_t>{2 * kChunk, 3 * kChunk}, 10U * device, device);
    REQUIRE(in.back().sleep().ok());
    out.emplace_back(r, std::vector<std::size_t>{kChunk, 4 * kChunk}, 100U * device, device);
    for (const auto& plan : out.back().plans()) there.sleep.segments.push_back(plan);
    for (CUdeviceptr at : in.back().addresses()) there.wake.segments.push_back(at);
  }
  SwitchResult result;
  REQUIRE(r.allocator->exchange(there, result).ok());
  CHECK(result.sleep.freed_bytes <= 15 * kChunk);
  CHECK_EQ(result.wake.restored_bytes, 15 * kChunk);
  for (int device = 0; device < 3; ++device) {
    CHECK(in[device].awake() && out[device].asleep());
    in[device].expect_bytes();
  }
  CHECK(r.allocator->verify().ok());
  for (int device = 0; device < 3; ++device) {
    REQUIRE(change_places(r, in[device], out[device]).ok());
    out[device].expect_bytes();
    in[device].free();
    out[device].free();
  }
  r.expect_empty();
}

TEST(discarded_contents_are_not_copied_and_may_be_filled) {
  Pair pair;
  rig::SwitchRequest there = rig::switch_of(pair.out->plans(), pair.in.addresses());
  there.sleep.segments[0].backup.clear();
  SwitchResult result;
  REQUIRE(pair.r.allocator->exchange(there, result).ok());
  CHECK_EQ(result.sleep.copied_bytes, 3 * kChunk);
  pair.expect_switched();
  rig::SwitchRequest back = rig::switch_of(pair.in.plans(), pair.out->addresses());
  back.wake.fill = 0xFF;
  REQUIRE(pair.r.allocator->exchange(back, result).ok());
  CHECK_EQ(result.wake.restored_bytes, 3 * kChunk);
  pair.out->parts[0].data.assign(3 * kChunk, 0xFF);
  pair.expect_unchanged();
  pair.end();
}

TEST(room_that_is_gone_is_no_error_while_something_is_still_to_leave) {
  Pair pair({kChunk, kChunk}, {kChunk, kChunk}, 8 * kChunk);
  rig::fail_call(pair.r, "cuMemCreate", 1, CUDA_ERROR_OUT_OF_MEMORY);
  REQUIRE(pair.go().ok());
  pair.expect_switched();
  pair.end();
}

// Takes all memory that is free on the device as soon as some was given back.
class Thief {
 public:
  explicit Thief(Rig& r) : r_(r), used_(used()), thread_([this] { steal(); }) {}
  ~Thief() { stop(); }
  void stop() {
    if (!thread_.joinable()) return;
    stopping_ = true;
    thread_.join();
    for (CUdeviceptr at : taken_) CHECK_OK(r_.computer.cu.cuMemFree(at));
  }

 private:
  std::uint64_t used() const {
    return r_.computer.cu.cumem_emulator_used_bytes(r_.computer.machine, 0);
  }
  void steal() {
    REQUIRE_OK(r_.computer.cu.cuCtxPushCurrent(r_.computer.context));
    while (!stopping_) {
      CUdeviceptr at = 0;
      if (used() >= used_ || r_.computer.cu.cuMemAlloc(&at, kChunk) != CUDA_SUCCESS) {
        std::this_thread::yield();
        continue;
      }
      taken_.push_back(at);
    }
    r_.computer.cu.cuCtxPopCurrent(nullptr);
  }

  Rig& r_;
  const std::uint64_t used_;
  std::atomic<bool> stopping_{false};
  std::vector<CUdeviceptr> taken_;
  std::thread thread_;
};

TEST(a_tenant_that_takes_the_room_midway_costs_no_byte) {
  for (const bool back : {false, true}) {
    Pair pair;
    Thief thief(pair.r);
    const Status status = pair.go();
    CHECK(status.ok() || status.fault == Fault::device_memory);
    CHECK(pair.r.allocator->verify().ok());
    pair.in.expect_bytes();
    pair.out->expect_bytes();
    thief.stop();
    REQUIRE((back ? pair.go_back() : pair.go()).ok());
    back ? pair.expect_unchanged() : pair.expect_switched();
    REQUIRE((back ? pair.go() : pair.go_back()).ok());
    back ? pair.expect_switched() : pair.expect_unchanged();
    pair.end();
  }
}

TEST(segments_freed_during_a_switch_end_exactly_once) {
  for (int round = 0; round < 10; ++round) {
    Pair pair;
    std::thread freer([&] {
      pair.out->free();
      pair.in.free();
    });
    (void)pair.go();
    freer.join();
    pair.r.allocator->drain();
    CHECK_EQ(pair.r.allocator->live_segments(), std::size_t{0});
    pair.r.expect_empty();
  }
}

TEST(a_switch_during_a_capture_changes_nothing_and_leaves_it_whole) {
  Pair pair;
  void* stream = pair.r.computer.cu.cumem_emulator_stream_create(pair.r.computer.machine, 0, 0);
  REQUIRE(pair.r.computer.cu.cumem_emulator_begin_capture(stream) == 0);
  CHECK(pair.go().fault == Fault::capture);
  CHECK(pair.r.computer.cu.cumem_emulator_end_capture(stream) == 0);
  pair.expect_unchanged();
  pair.r.computer.cu.cumem_emulator_stream_destroy(stream);
  pair.end();
}

TEST(work_that_is_pending_is_in_the_backup_of_a_switch) {
  Pair pair;
  void* stream = pair.r.computer.cu.cumem_emulator_stream_create(pair.r.computer.machine, 0, 1);
  rig::Part& part = pair.out->parts[1];
  part.data = Rig::pattern(2 * kChunk, 99);
  pair.r.computer.cu.cumem_emulator_enqueue_write(pair.r.computer.machine, stream, part.at,
                                                  part.data.data(), part.data.size(), 30000);
  REQUIRE(pair.go().ok());
  REQUIRE(pair.go_back().ok());
  pair.expect_unchanged();
  pair.r.computer.cu.cumem_emulator_stream_destroy(stream);
  pair.end();
}

}  // namespace
