// Do a file's bytes get into memory that is awake, in order with other work, and does
// every failure of every driver call leave the segments awake and whole?
#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <cstdlib>
#include <thread>

#include "core_rig.h"

namespace {

using cumem::Fault;
using cumem::File;
using cumem::FilePart;
using cumem::Status;
using rig::Rig;

const char* const kCalls[] = {"cuCtxPopCurrent",     "cuCtxPushCurrent",   "cuCtxSynchronize",
                              "cuEventCreate",       "cuEventRecord",      "cuEventSynchronize",
                              "cuMemHostRegister",   "cuMemcpyHtoDAsync",  "cuStreamCreate",
                              "cuStreamSynchronize", "cuStreamIsCapturing"};

constexpr std::size_t kBytes = 2 * kChunk;
constexpr std::size_t kHeader = 100;
const auto kContents = Rig::pattern(kHeader + 2 * kBytes, 7);
const auto kBefore = Rig::pattern(kBytes, 8);

rig::Config config(unsigned threads) {
  rig::Config config = rig::small_chunks();
  config.file.threads = threads;
  config.file.buffer_bytes = kMiB;
  config.file.ring_bytes = 4 * kMiB;
  return config;
}

struct Scene {
  Rig r;
  int descriptor = -1;
  std::shared_ptr<File> file;
  CUdeviceptr first = 0;
  CUdeviceptr second = 0;

  explicit Scene(unsigned threads = 1, int devices = 1) : r(64 * kMiB, config(threads), devices) {
    char name[] = "/tmp/cumem-test-XXXXXX";
    descriptor = mkostemp(name, O_CLOEXEC);
    REQUIRE(descriptor >= 0);
    unlink(name);
    REQUIRE(pwrite(descriptor, kContents.data(), kContents.size(), 0) ==
            static_cast<ssize_t>(kContents.size()));
    REQUIRE(File::adopt(descriptor, "model", kHeader, file).ok());
    first = r.make(kBytes);
    second = r.make(kBytes, "weights", devices - 1);
    r.write(first, kBefore);
    r.write(second, kBefore);
  }
  ~Scene() { close(descriptor); }

  // All of the second segment, and of the first two parts with a hole of 3 bytes.
  std::vector<FilePart> parts() const {
    return {{{first, 5}, kHeader},
            {{first + 8, kBytes - 8}, kHeader + 8},
            {{second, kBytes}, kHeader + kBytes}};
  }
  Status read() { return r.allocator->read_into(*file, parts()); }
  void expect_bytes() {
    std::vector<unsigned char> expected(kContents.begin() + kHeader,
                                        kContents.begin() + kHeader + kBytes);
    std::copy(kBefore.begin() + 5, kBefore.begin() + 8, expected.begin() + 5);
    CHECK(r.read(first, kBytes) == expected);
    expected.assign(kContents.begin() + kHeader + kBytes, kContents.end());
    CHECK(r.read(second, kBytes) == expected);
  }
  void expect_untouched() {
    CHECK(r.read(first, kBytes) == kBefore);
    CHECK(r.read(second, kBytes) == kBefore);
  }
  void expect_clean_end() {
    CHECK(!r.asleep(first) && !r.asleep(second));
    CHECK(r.allocator->verify().ok());
    r.allocator->free(first);
    r.allocator->free(second);
    CHECK_EQ(r.allocator->live_segments(), std::size_t{0});
    CHECK_EQ(r.allocator->host().usage().used_bytes, std::size_t{0});
    r.expect_empty();
  }
  long calls(const char* call) {
    return r.computer.cu.cumem_emulator_call_count(r.computer.machine, call);
  }
};

TEST(a_file_is_read_into_awake_memory_by_several_threads) {
  for (unsigned threads : {1U, 3U}) {
    Scene scene(threads);
    REQUIRE(scene.read().ok());
    CHECK_EQ(scene.r.allocator->file_bytes(), std::uint64_t{2 * kBytes - 3});
    scene.expect_bytes();
    scene.expect_clean_end();
  }
}

TEST(a_file_is_read_into_memory_of_two_devices) {
  Scene scene(2, 2);
  REQUIRE(scene.read().ok());
  scene.expect_bytes();
  scene.expect_clean_end();
}

TEST(no_parts_are_read_without_a_call_of_the_driver) {
  Scene scene;
  CHECK(scene.r.allocator->read_into(*scene.file, {}).ok());
  CHECK_EQ(scene.calls("cuCtxSynchronize"), 0L);
  scene.expect_untouched();
  scene.expect_clean_end();
}

TEST(every_failure_in_a_read_leaves_segments_awake_and_a_retry_succeeds) {
  for (const char* call : kCalls) {
    long made = 0;
    {
      Scene scene;
      made = -scene.calls(call);
      REQUIRE(scene.read().ok());
      made += scene.calls(call);
    }
    for (long nth = 1; nth <= made; ++nth) {
      Scene scene;
      scene.r.computer.cu.cumem_emulator_fail(scene.r.computer.machine, call, nth,
                                              CUDA_ERROR_UNKNOWN);
      const Status status = scene.read();
      scene.r.computer.cu.cumem_emulator_clear(scene.r.computer.machine);
      if (status.ok()) scene.expect_bytes();
      CHECK(!scene.r.asleep(scene.first) && !scene.r.asleep(scene.second));
      CHECK(scene.r.allocator->verify().ok());
      REQUIRE(scene.read().ok());
      scene.expect_bytes();
      scene.expect_clean_end();
    }
  }
}

// Of calls whose refusal must be told, each is.
TEST(a_refused_copy_or_wait_is_told) {
  for (const char* call : {"cuCtxSynchronize", "cuEventRecord", "cuEventSynchronize",
                           "cuMemcpyHtoDAsync", "cuCtxPushCurrent"}) {
    Scene scene;
    REQUIRE(scene.read().ok());
    // The first context is pushed to ask for a capture: unanswered, there is none.
    const long nth = std::string(call) == "cuCtxPushCurrent" ? 2 : 1;
    scene.r.computer.cu.cumem_emulator_fail(scene.r.computer.machine, call, nth,
                                            CUDA_ERROR_UNKNOWN);
    CHECK_EQ(std::string(scene.read().call), std::string(call));
    scene.r.computer.cu.cumem_emulator_clear(scene.r.computer.machine);
    scene.expect_clean_end();
  }
}

TEST(memory_that_is_not_wholly_awake_and_ours_is_refused_before_anything_is_written) {
  Scene scene;
  auto expect_refused = [&](FilePart part) {
    std::vector<FilePart> parts = scene.parts();
    parts.push_back(part);
    const Status status = scene.r.allocator->read_into(*scene.file, parts);
    CHECK(status.fault == Fault::invalid);
    CHECK_EQ(status.address, static_cast<std::uintptr_t>(part.range.address));
  };
  expect_refused({{4096, 1}, 0});
  expect_refused({{scene.first + kBytes - 1, 2}, 0});
  expect_refused({{scene.first, ~std::size_t{0}}, 0});
  const CUdeviceptr third = scene.r.make(kBytes);
  scene.r.write(third, kBefore);
  REQUIRE(scene.r.sleep({Rig::whole(third, kBytes)}).ok());
  expect_refused({{third, 1}, 0});
  scene.expect_untouched();
  REQUIRE(scene.r.wake({third}).ok());
  CHECK(scene.r.read(third, kBytes) == kBefore);
  scene.r.allocator->free(third);
  scene.expect_clean_end();
}

TEST(a_file_that_is_short_or_has_changed_is_told) {
  Scene scene;
  const unsigned char more = 1;
  REQUIRE(pwrite(scene.descriptor, &more, 1, static_cast<off_t>(kContents.size())) == 1);
  CHECK(scene.read().fault == Fault::source);
  REQUIRE(ftruncate(scene.descriptor, kHeader + kBytes) == 0);
  const Status status = scene.read();
  CHECK(status.fault == Fault::source && status.path && *status.path == "model");
  scene.expect_clean_end();
}

TEST(a_host_without_room_writes_nothing) {
  Scene scene;
  rig::Config small = config(1);
  small.host.limit_bytes = 1000;
  scene.r.allocator->configure(small);
  CHECK(scene.read().fault == Fault::host_memory);
  scene.expect_untouched();
  scene.expect_clean_end();
}

TEST(a_capture_is_not_disturbed) {
  Scene scene;
  CUstream stream = nullptr;
  REQUIRE_OK(scene.r.computer.cu.cuStreamCreate(&stream, CU_STREAM_DEFAULT));
  REQUIRE_OK(scene.r.computer.cu.cuStreamBeginCapture(stream, CU_STREAM_CAPTURE_MODE_THREAD_LOCAL));
  CHECK(scene.read().fault == Fault::capture);
  CUgraph graph = nullptr;
  REQUIRE_OK(scene.r.computer.cu.cuStreamEndCapture(stream, &graph));
  REQUIRE_OK(scene.r.computer.cu.cuStreamDestroy(stream));
  scene.expect_untouched();
  scene.expect_clean_end();
}

// Work that was pending writes first; a free and a sleep of another thread come after.
TEST(a_read_is_in_order_with_other_work_a_free_and_a_sleep) {
  Scene scene(2);
  auto enqueue = [&](CUdeviceptr at) {
    REQUIRE_OK(static_cast<CUresult>(scene.r.computer.cu.cumem_emulator_enqueue_write(
        scene.r.computer.machine, nullptr, at, kBefore.data(), kBytes, 30000)));
  };
  enqueue(scene.first);
  std::thread sleeper([&] {
    while (scene.r.allocator->file_bytes() == 0) std::this_thread::yield();
    (void)scene.r.sleep({Rig::whole(scene.first, kBytes)});
  });
  REQUIRE(scene.read().ok());
  sleeper.join();
  REQUIRE(scene.r.wake({scene.first}).ok());
  scene.expect_bytes();
  enqueue(scene.first);
  std::thread freer([&] { scene.r.allocator->free(scene.second); });
  (void)scene.read();  // whichever comes first
  freer.join();
  CHECK_EQ(scene.r.allocator->live_segments(), std::size_t{1});
  CHECK(scene.r.allocator->verify().ok());
  scene.r.allocator->free(scene.first);
  scene.r.expect_empty();
}

}  // namespace
