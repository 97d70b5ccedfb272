// Does the core keep its promises when nothing goes wrong?
#include <thread>

#include "core_rig.h"

namespace {

using cumem::Status;
using rig::Rig;

TEST(malloc_rounds_up_to_the_granularity_and_free_returns_everything) {
  Rig r;
  const CUdeviceptr a = r.make(1);
  CHECK_EQ(r.info(a).bytes, kChunk);
  const CUdeviceptr b = r.make(kChunk + 1);
  CHECK_EQ(r.info(b).bytes, 2 * kChunk);
  CHECK_EQ(r.info(b).mapped_chunks, std::size_t{2});
  CHECK(r.allocator->verify().ok());
  r.allocator->free(a);
  r.allocator->free(b);
  r.expect_empty();
}

TEST(bytes_and_address_survive_many_cycles) {
  Rig r;
  const std::size_t bytes = 5 * kChunk;
  const CUdeviceptr a = r.make(bytes);
  for (unsigned round = 0; round < 5; ++round) {
    const auto data = Rig::pattern(bytes, round);
    r.write(a, data);
    REQUIRE(r.sleep({Rig::whole(a, bytes)}).ok());
    CHECK_EQ(r.slept.freed_bytes, bytes);
    CHECK_EQ(r.slept.copied_bytes, bytes);
    CHECK(r.asleep(a));
    CHECK(!r.allocator->is_awake(a, 1));
    CHECK_EQ(r.computer.ledger().handles, r.start.handles);
    CHECK(r.allocator->verify().ok());
    REQUIRE(r.wake({a}).ok());
    CHECK_EQ(r.woken.restored_bytes, bytes);
    CHECK(r.read(a, bytes) == data);
    CHECK(r.allocator->verify().ok());
  }
  r.allocator->free(a);
  r.expect_empty();
}

TEST(only_the_ranges_of_the_plan_come_back) {
  Rig r;
  const std::size_t bytes = 2 * kChunk;
  const CUdeviceptr a = r.make(bytes);
  const auto data = Rig::pattern(bytes, 7);
  r.write(a, data);
  const std::size_t first = 512;
  const std::size_t second = kChunk - 256;  // crosses the chunks
  REQUIRE(r.sleep({{a, {{a + first, 1024}, {a + second, 512}}}}).ok());
  CHECK_EQ(r.slept.copied_bytes, std::size_t{1536});
  REQUIRE(r.wake({a}, 0xAB).ok());
  const auto now = r.read(a, bytes);
  CHECK(std::equal(now.begin() + first, now.begin() + first + 1024, data.begin() + first));
  CHECK(std::equal(now.begin() + second, now.begin() + second + 512, data.begin() + second));
  CHECK_EQ(static_cast<int>(now[0]), 0xAB);
  CHECK_EQ(static_cast<int>(now[bytes - 1]), 0xAB);
  r.allocator->free(a);
  r.expect_empty();
}

TEST(a_sleep_that_only_discards_takes_no_host_memory) {
  Rig r;
  const CUdeviceptr a = r.make(kChunk);
  const long before =
      r.computer.cu.cumem_emulator_call_count(r.computer.machine, "cuMemHostRegister");
  REQUIRE(r.sleep({{a, {}}}).ok());
  CHECK_EQ(r.allocator->host().usage().held_bytes, std::size_t{0});
  CHECK_EQ(r.computer.cu.cumem_emulator_call_count(r.computer.machine, "cuMemHostRegister"),
           before);
  CHECK_EQ(r.computer.cu.cumem_emulator_call_count(r.computer.machine, "cuMemcpyDtoHAsync"), 0L);
  r.allocator->free(a);
  r.expect_empty();
}

TEST(repeats_do_nothing) {
  Rig r;
  const CUdeviceptr a = r.make(kChunk);
  const auto data = Rig::pattern(kChunk, 3);
  r.write(a, data);
  REQUIRE(r.sleep({Rig::whole(a, kChunk)}).ok());
  REQUIRE(r.sleep({Rig::whole(a, kChunk)}).ok());
  CHECK(r.slept.segments.empty());
  REQUIRE(r.wake({a}).ok());
  REQUIRE(r.wake({a}).ok());
  CHECK(r.woken.segments.empty());
  CHECK(r.read(a, kChunk) == data);
  r.allocator->free(a);
}

TEST(a_plan_that_does_not_fit_its_segment_is_refused_whole) {
  Rig r;
  const CUdeviceptr a = r.make(kChunk);
  const CUdeviceptr b = r.make(kChunk);
  CHECK(r.sleep({Rig::whole(a, kChunk), {b, {{b, kChunk + 1}}}}).fault == cumem::Fault::invalid);
  CHECK(r.sleep({{a, {{a + 512, 512}, {a, 512}}}}).fault == cumem::Fault::invalid);
  CHECK(!r.asleep(a));
  CHECK(!r.asleep(b));
  r.allocator->free(a);
  r.allocator->free(b);
  r.expect_empty();
}

TEST(free_while_asleep_returns_addresses_and_host_memory) {
  Rig r;
  const CUdeviceptr a = r.make(3 * kChunk);
  REQUIRE(r.sleep({Rig::whole(a, 3 * kChunk)}).ok());
  CHECK_EQ(r.allocator->host().usage().used_bytes, 3 * kChunk);
  r.allocator->free(a);
  CHECK_EQ(r.allocator->host().usage().used_bytes, std::size_t{0});
  r.expect_empty();
}

TEST(wake_without_room_changes_nothing_and_works_later) {
  Rig r(16 * kMiB);
  const std::size_t bytes = 8 * kMiB;
  const CUdeviceptr a = r.make(bytes);
  const auto data = Rig::pattern(bytes, 11);
  r.write(a, data);
  REQUIRE(r.sleep({Rig::whole(a, bytes)}).ok());
  CUdeviceptr hog = 0;
  REQUIRE_OK(r.computer.cu.cuMemAlloc(&hog, 12 * kMiB));
  const auto before = r.computer.ledger();
  const Status status = r.wake({a});
  CHECK(status.fault == cumem::Fault::device_memory);
  CHECK_EQ(status.free_bytes, std::size_t{4 * kMiB});
  CHECK(r.asleep(a));
  CHECK_EQ(r.computer.ledger().handles, before.handles);
  CHECK(r.allocator->verify().ok());
  REQUIRE_OK(r.computer.cu.cuMemFree(hog));
  REQUIRE(r.wake({a}).ok());
  CHECK(r.read(a, bytes) == data);
  r.allocator->free(a);
  r.expect_empty();
}

TEST(a_free_during_a_capture_is_put_off) {
  Rig r;
  const CUdeviceptr a = r.make(kChunk);
  void* stream = r.computer.cu.cumem_emulator_stream_create(r.computer.machine, 0, 0);
  REQUIRE(r.computer.cu.cumem_emulator_begin_capture(stream) == 0);
  r.allocator->free(a);
  CHECK_EQ(r.allocator->counters().waiting, std::uint64_t{1});
  CHECK(r.sleep({Rig::whole(a, kChunk)}).fault == cumem::Fault::capture);
  CHECK(r.computer.cu.cumem_emulator_end_capture(stream) == 0);
  r.allocator->drain();
  CHECK_EQ(r.allocator->counters().waiting, std::uint64_t{0});
  r.computer.cu.cumem_emulator_stream_destroy(stream);
  r.expect_empty();
}

TEST(pending_work_is_in_the_backup) {
  Rig r;
  const CUdeviceptr a = r.make(kChunk);
  const auto data = Rig::pattern(kChunk, 5);
  void* stream = r.computer.cu.cumem_emulator_stream_create(r.computer.machine, 0, 1);
  r.computer.cu.cumem_emulator_enqueue_write(r.computer.machine, stream, a, data.data(),
                                             data.size(), 30000);
  REQUIRE(r.sleep({Rig::whole(a, kChunk)}).ok());
  REQUIRE(r.wake({a}).ok());
  CHECK(r.read(a, kChunk) == data);
  r.computer.cu.cumem_emulator_stream_destroy(stream);
  r.allocator->free(a);
}

TEST(pageable_memory_serves_when_pinning_is_refused) {
  Rig r;
  REQUIRE(r.computer.cu.cumem_emulator_set_host_refusal(r.computer.machine, 1) == 0);
  const CUdeviceptr a = r.make(kChunk);
  const auto data = Rig::pattern(kChunk, 9);
  r.write(a, data);
  REQUIRE(r.sleep({Rig::whole(a, kChunk)}).ok());
  CHECK_EQ(r.slept.pageable_bytes, kChunk);
  REQUIRE(r.wake({a}).ok());
  CHECK(r.read(a, kChunk) == data);
  r.allocator->free(a);
  r.expect_empty();
}

TEST(the_callers_context_is_left_as_it_was) {
  Rig r(64 * kMiB, rig::small_chunks(), 2);
  CUcontext before = nullptr;
  CUcontext after = nullptr;
  REQUIRE_OK(r.computer.cu.cuCtxGetCurrent(&before));
  const CUdeviceptr a = r.make(kChunk, "weights", 1);
  REQUIRE(r.sleep({Rig::whole(a, kChunk)}).ok());
  REQUIRE(r.wake({a}).ok());
  r.allocator->free(a);
  REQUIRE_OK(r.computer.cu.cuCtxGetCurrent(&after));
  CHECK(before == after);
}

}  // namespace
