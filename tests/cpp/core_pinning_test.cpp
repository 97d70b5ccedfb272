// Is each piece of new host memory pinned once, and is a refusal of any of them told?
#include <memory>
#include <vector>

#include "failures.h"
#include "models.h"

namespace {

using rig::Config;
using rig::Part;
using rig::Rig;

constexpr std::size_t kPieces = 26;

Config many_pieces(bool allow_pageable) {
  Config config = rig::small_chunks();
  config.host.piece_bytes = kChunk;
  config.host.touch_threads = 4;
  config.host.allow_pageable = allow_pageable;
  return config;
}

struct Scene {
  explicit Scene(bool allow_pageable)
      : r(64 * kMiB, many_pieces(allow_pageable)), part(r, kPieces * kChunk, 5) {}
  cumem::Status sleep() { return r.sleep({part.plan()}); }

  Rig r;
  Part part;
};

TEST(every_piece_is_pinned_once) {
  Scene scene(false);
  const std::uint64_t before = scene.r.computer.ledger().host_registrations;
  REQUIRE(scene.sleep().ok());
  CHECK_EQ(scene.r.computer.ledger().host_registrations - before, kPieces);
  CHECK_EQ(scene.r.slept.pageable_bytes, std::size_t{0});
  REQUIRE(scene.r.wake({scene.part.at}).ok());
  CHECK(scene.part.intact(scene.r));
}

TEST(a_piece_that_is_refused_is_pageable) {
  for (const long nth : {1, 9, 26}) {
    Scene scene(true);
    rig::fail_call(scene.r, "cuMemHostRegister", nth, CUDA_ERROR_OUT_OF_MEMORY);
    REQUIRE(scene.sleep().ok());
    CHECK_EQ(scene.r.slept.pageable_bytes, kChunk);
    REQUIRE(scene.r.wake({scene.part.at}).ok());
    CHECK(scene.part.intact(scene.r));
  }
}

TEST(a_refusal_fails_the_sleep_where_pinning_is_required) {
  for (long nth = 1; nth <= static_cast<long>(kPieces); nth += 5) {
    Scene scene(false);
    rig::fail_call(scene.r, "cuMemHostRegister", nth, CUDA_ERROR_OUT_OF_MEMORY);
    CHECK(scene.sleep().fault == cumem::Fault::host_memory);
    CHECK(!scene.r.asleep(scene.part.at));
    CHECK(scene.part.intact(scene.r));
    CHECK(scene.r.allocator->verify().ok());
    REQUIRE(scene.sleep().ok());
    REQUIRE(scene.r.wake({scene.part.at}).ok());
    CHECK(scene.part.intact(scene.r));
  }
}

TEST(memory_that_was_never_pinned_is_given_back) {
  Scene scene(false);
  const std::uint64_t before = scene.r.computer.ledger().host_registrations;
  cumem::Device* device = nullptr;
  REQUIRE(scene.r.allocator->device(0, &device).ok());
  REQUIRE(scene.r.allocator->host().reserve(kPieces * kChunk, *device).ok());
  CHECK_EQ(scene.r.allocator->host().pieces().size(), kPieces);
  CHECK_EQ(scene.r.computer.ledger().host_registrations, before);
  CHECK_EQ(scene.r.allocator->release_host(), kPieces * kChunk);
}

}  // namespace
