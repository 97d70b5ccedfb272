// Does a digester that fails, or fails to load, leave everything as it was?

#include "failures.h"
#include "warm_segment.h"

namespace {

using rig::DigestRig;
using rig::fail_call;
using rig::Rig;
using rig::Warm;

void expect_nothing_loaded(Rig& r) {
  const auto ledger = r.computer.ledger();
  CHECK(!r.allocator->has_digester(0));
  CHECK_EQ(ledger.modules, std::uint64_t{0});
  CHECK_EQ(ledger.streams, r.start.streams);
  CHECK_EQ(ledger.events, r.start.events);
  CHECK_EQ(ledger.host_registrations, r.start.host_registrations);
}

TEST(every_failure_to_load_a_digester_leaves_nothing_and_a_retry_succeeds) {
  for (const char* call : {"cuModuleLoadData", "cuModuleGetFunction", "cuStreamCreate",
                           "cuEventCreate", "cuMemHostRegister", "cuCtxPushCurrent"}) {
    for (long nth = 1; nth <= (call == std::string("cuEventCreate") ? 2 : 1); ++nth) {
      Rig r;
      fail_call(r, call, nth);
      CHECK(!r.allocator->load_digester(0, rig::kDigestImage).ok());
      expect_nothing_loaded(r);
      {
        Warm plain(kChunk, {{0, kChunk}}, r);
        CHECK_EQ(plain.cycle(), kChunk);
        CHECK(!r.slept.digested);
      }
      r.load_digester();
      Warm segment(kChunk, {{0, kChunk}}, r);
      CHECK_EQ(segment.cycle(), std::size_t{0});
    }
  }
}

TEST(an_image_that_is_none_is_refused) {
  Rig r;
  CHECK(!r.allocator->load_digester(0, "something else").ok());
  expect_nothing_loaded(r);
  CHECK(!r.allocator->load_digester(7, rig::kDigestImage).ok());
}

TEST(a_digester_is_loaded_once_and_goes_with_its_allocator) {
  Rig r;
  r.load_digester();
  const auto ledger = r.computer.ledger();
  CHECK_EQ(ledger.modules, std::uint64_t{1});
  CHECK(r.allocator->load_digester(0, rig::kDigestImage).ok());
  CHECK_EQ(r.computer.ledger().modules, std::uint64_t{1});
  CHECK_EQ(r.computer.ledger().streams, ledger.streams);
  CHECK_EQ(r.driver->ledger().registered_bytes.load(), ledger.registered_bytes);
  r.allocator.reset();
  const auto after = r.computer.ledger();
  CHECK_EQ(after.modules + after.streams + after.events + after.host_registrations,
           std::uint64_t{0});
  CHECK_EQ(r.driver->ledger().registered_bytes.load(), std::uint64_t{0});
  CHECK_EQ(r.driver->ledger().refused.load(), std::uint64_t{0});
}

TEST(every_failure_when_a_digester_goes_is_counted_and_stops_nothing_else) {
  for (const char* call : {"cuStreamSynchronize", "cuMemHostUnregister", "cuEventDestroy",
                           "cuStreamDestroy", "cuModuleUnload"}) {
    Rig r;
    r.load_digester();
    {
      Warm segment(kChunk, {{0, kChunk}}, r);
    }
    r.allocator->release_host();
    fail_call(r, call);
    r.allocator.reset();
    CHECK_EQ(r.driver->ledger().refused.load(), std::uint64_t{1});
    CHECK(!r.computer.ledger().dead_contexts);
  }
}

// Three batches, so that failures come while other batches run.
TEST(a_failure_in_each_batch_leaves_an_exact_state_and_a_retry_succeeds) {
  std::vector<rig::Range> offsets;
  for (std::size_t i = 0; i < 1030; ++i) offsets.push_back({i * 1024, 512});
  for (const char* call : {"cuLaunchKernel", "cuEventRecord", "cuEventSynchronize"}) {
    for (long nth = 1; nth <= 3; ++nth) {
      DigestRig r;
      Warm segment(kChunk, offsets, r);
      for (const std::size_t piece : {1, 600, 1029}) segment.change(piece * 1024);
      fail_call(r, call, nth);
      CHECK(!r.sleep({segment.plan()}).ok());
      CHECK(!r.asleep(segment.at));
      segment.expect_bytes();
      CHECK(r.allocator->verify().ok());
      segment.change(2 * 1024);
      segment.cycle();
    }
  }
}

// The kernel of the failed sleep runs on while the segment is freed.
TEST(memory_that_is_still_digested_is_not_freed) {
  DigestRig r;
  const CUdeviceptr at = r.make(8 * kChunk);
  r.computer.cu.cumem_emulator_set_latency(r.computer.machine, 30000);
  fail_call(r, "cuEventSynchronize");
  CHECK(!r.sleep({Rig::whole(at, 8 * kChunk)}).ok());
  r.allocator->free(at);
  CHECK_EQ(r.computer.ledger().dead_contexts, std::uint64_t{0});
  CHECK_EQ(r.allocator->counters().quarantined, std::uint64_t{0});
  r.expect_empty();
}

TEST(a_context_that_dies_of_a_digest_is_told_apart) {
  DigestRig r;
  Warm segment(kChunk, {{0, kChunk}}, r);
  fail_call(r, "cuEventSynchronize", 1, CUDA_ERROR_ILLEGAL_ADDRESS);
  CHECK(r.sleep({segment.plan()}).fault == cumem::Fault::dead_context);
  CHECK(!r.asleep(segment.at));
  CHECK_EQ(segment.cycle(), kChunk);
}

TEST(a_refused_release_after_a_clean_skip_can_be_continued_or_undone) {
  for (const bool with_wake : {false, true}) {
    DigestRig r;
    Warm segment(2 * kChunk, {{0, 2 * kChunk}}, r);
    segment.change(kChunk);
    fail_call(r, "cuMemRelease", 2);
    CHECK(!r.sleep({segment.plan()}).ok());
    CHECK(r.asleep(segment.at));
    CHECK_EQ(r.info(segment.at).handles, std::size_t{1});
    if (!with_wake) REQUIRE(r.sleep({segment.plan()}).ok());
    REQUIRE(r.wake({segment.at}).ok());
    segment.expect_bytes();
    CHECK_EQ(segment.cycle(), std::size_t{0});
  }
}

TEST(every_failure_in_a_wake_keeps_digests_true) {
  for (const char* call : {"cuMemCreate", "cuMemMap", "cuMemSetAccess", "cuMemcpyHtoDAsync",
                           "cuEventRecord", "cuEventSynchronize"}) {
    DigestRig r;
    Warm segment(2 * kChunk, {{0, 2 * kChunk}}, r);
    segment.change(3);
    REQUIRE(r.sleep({segment.plan()}).ok());
    fail_call(r, call);
    CHECK(!r.wake({segment.at}).ok());
    CHECK(r.asleep(segment.at));
    REQUIRE(r.wake({segment.at}).ok());
    segment.expect_bytes();
    CHECK_EQ(segment.cycle(), std::size_t{0});
  }
}

}  // namespace
