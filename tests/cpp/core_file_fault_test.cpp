// Does every failure of every driver call leave an exact state where contents are in
// files? One segment is read from a file and left to it, one sleeps to disk.
#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdlib>
#include <functional>

#include "failures.h"
#include "models.h"

namespace {

using cumem::Status;
using cumem::Store;
using rig::Rig;

constexpr std::size_t kBytes = 2 * kChunk;
constexpr std::size_t kHeader = 100;
const auto kContents = Rig::pattern(kHeader + kBytes, 7);
const auto kOther = Rig::pattern(kBytes, 8);

rig::Config config() {
  rig::Config config = rig::small_chunks();
  config.file.threads = 1;  // calls come in one order
  config.file.buffer_bytes = kMiB;
  config.file.ring_bytes = 2 * kMiB;
  config.file.folder = "/tmp";
  return config;
}

// A file that holds the contents, open and without a name.
int make_file() {
  char name[] = "/tmp/cumem-test-XXXXXX";
  const int file = mkostemp(name, O_CLOEXEC);
  REQUIRE(file >= 0);
  unlink(name);
  REQUIRE(pwrite(file, kContents.data(), kContents.size(), 0) ==
          static_cast<ssize_t>(kContents.size()));
  return file;
}

struct Scene {
  Rig r{64 * kMiB, config()};
  const int file = make_file();
  const bool mapped;  // the file's own pages are read
  std::uint64_t pinned_before = 0;
  CUdeviceptr loaded = 0;
  CUdeviceptr other = 0;

  explicit Scene(bool mapped = false) : mapped(mapped) {
    r.load_digester();
    pinned_before = pinned();
    other = r.make(kBytes);
    r.write(other, kOther);
  }
  ~Scene() { close(file); }

  Status reserve() {
    auto source = std::make_unique<cumem::Source>();
    std::shared_ptr<cumem::File> held;
    REQUIRE(cumem::File::adopt(file, "model", kHeader, held).ok());
    source->file = held;
    source->parts = {{{0, kBytes}, kHeader}};
    source->keep = true;
    if (mapped) REQUIRE(cumem::MappedFile::make(r.allocator->host(), *held, source->mapped).ok());
    return r.allocator->reserve(kBytes, 0, {"weights", "reload", 0, false}, std::move(source),
                                loaded);
  }
  void load() { REQUIRE(reserve().ok() && wake().ok()); }
  Status sleep(Store store = Store::disk) {
    return r.sleep(
        {{loaded, {{loaded, kBytes}}, {}, Store::source}, {other, {{other, kBytes}}, {}, store}});
  }
  Status wake() { return r.wake({loaded, other}, 0xFF); }
  // Both by a switch, with the file last: its segment is waited for and proven there.
  Status arrive() {
    rig::SwitchResult result;
    return r.allocator->exchange(rig::switch_of({}, {other, loaded}), result);
  }
  std::uint64_t pinned() const { return r.driver->ledger().registered_bytes; }
  bool loaded_is_intact() {
    return r.read(loaded, kBytes) ==
           std::vector<unsigned char>(kContents.begin() + kHeader, kContents.end());
  }
  bool other_is_intact() { return r.read(other, kBytes) == kOther; }
  void expect_bytes() {
    CHECK(loaded_is_intact());
    CHECK(other_is_intact());
  }
  void expect_bytes_of_what_is_awake(const char* call) {
    const bool intact = (r.asleep(loaded) || loaded_is_intact()) &&
                        (r.asleep(other) || other_is_intact()) && r.allocator->verify().ok();
    if (!intact) check::expect(false, __FILE__, __LINE__, call);
  }
  void expect_clean_end() {
    r.allocator->free(loaded);
    r.allocator->free(other);
    CHECK_EQ(r.allocator->live_segments(), std::size_t{0});
    CHECK_EQ(r.allocator->host().usage().used_bytes, std::size_t{0});
    r.allocator->host().release_idle();
    CHECK_EQ(pinned(), pinned_before);
    r.expect_empty();
  }
};

using Step = std::function<void(Scene&)>;

void for_every_failure(const Step& prepare, const Step& operation, const Step& after) {
  rig::for_each_failure<Scene>(
      [&] {
        auto scene = std::make_unique<Scene>();
        prepare(*scene);
        return scene;
      },
      operation,
      [&](Scene& scene, const char* call, long) {
        const Status status = scene.r.allocator->verify();
        if (!status.ok()) check::expect(false, __FILE__, __LINE__, call);
        after(scene);
      });
}

TEST(every_failure_in_a_load_leaves_it_asleep_and_a_retry_succeeds) {
  for_every_failure([](Scene& scene) { REQUIRE(scene.reserve().ok()); },
                    [](Scene& scene) { (void)scene.wake(); },
                    [](Scene& scene) {
                      REQUIRE(scene.wake().ok());
                      scene.expect_bytes();
                      scene.expect_clean_end();
                    });
}

TEST(every_failure_in_a_sleep_to_files_leaves_an_exact_state_and_a_retry_succeeds) {
  for_every_failure([](Scene& scene) { scene.load(); }, [](Scene& scene) { (void)scene.sleep(); },
                    [](Scene& scene) {
                      REQUIRE(scene.sleep().ok());
                      CHECK(scene.r.asleep(scene.loaded) && scene.r.asleep(scene.other));
                      CHECK_EQ(scene.r.allocator->host().usage().used_bytes, std::size_t{0});
                      REQUIRE(scene.wake().ok());
                      scene.expect_bytes();
                      scene.expect_clean_end();
                    });
}

TEST(every_failure_in_a_wake_from_files_leaves_both_asleep_and_a_retry_succeeds) {
  for_every_failure(
      [](Scene& scene) {
        scene.load();
        REQUIRE(scene.sleep().ok());
      },
      [](Scene& scene) { (void)scene.wake(); },
      [](Scene& scene) {
        CHECK_EQ(scene.r.asleep(scene.loaded), scene.r.asleep(scene.other));
        REQUIRE(scene.wake().ok());
        scene.expect_bytes();
        scene.expect_clean_end();
      });
}

// Of the calls those that are made for the pages, or come after them.
TEST(every_failure_of_a_load_and_a_wake_from_a_files_own_pages_leaves_an_exact_state) {
  rig::for_each_failure<Scene>(
      {"cuMemHostRegister", "cuMemMap", "cuMemcpyHtoDAsync", "cuStreamSynchronize"},
      [] {
        auto scene = std::make_unique<Scene>(true);
        REQUIRE(scene->reserve().ok());
        return scene;
      },
      [](Scene& scene) {
        if (scene.wake().ok() && scene.sleep().ok()) (void)scene.wake();
      },
      [](Scene& scene, const char*, long) {
        REQUIRE(scene.wake().ok());
        scene.expect_bytes();
        REQUIRE(scene.sleep().ok());
        REQUIRE(scene.wake().ok());
        scene.expect_bytes();
        scene.expect_clean_end();
      });
}

// What was gathered for memory is submitted by the wait for a file.
TEST(every_failure_of_a_switch_to_memory_and_a_file_leaves_an_exact_state) {
  for (const bool mapped : {false, true})
    rig::for_each_failure<Scene>(
        {"cuEventRecord", "cuEventSynchronize", "cuMemcpyBatchAsync", "cuMemcpyHtoDAsync"},
        [mapped] {
          auto scene = std::make_unique<Scene>(mapped);
          scene->load();
          REQUIRE(scene->sleep(Store::host).ok());
          return scene;
        },
        [](Scene& scene) { (void)scene.arrive(); },
        [](Scene& scene, const char* call, long) {
          scene.expect_bytes_of_what_is_awake(call);
          REQUIRE(scene.arrive().ok());
          scene.expect_bytes();
          scene.expect_clean_end();
        });
}

std::size_t pinned_pages(const Scene& scene) {
  std::size_t bytes = 0;
  for (const rig::SegmentInfo& info : scene.r.allocator->segments())
    bytes += info.pinned_file_bytes;
  return bytes;
}

TEST(a_files_own_pages_stay_pinned_while_its_segment_lives) {
  Scene scene(true);
  REQUIRE(scene.reserve().ok());
  CHECK_EQ(pinned_pages(scene), std::size_t{0});
  REQUIRE(scene.wake().ok());
  for (int cycle = 0; cycle < 2; ++cycle) {
    CHECK_EQ(pinned_pages(scene), kContents.size());
    scene.expect_bytes();
    REQUIRE(scene.sleep().ok() && scene.wake().ok());
  }
  scene.r.allocator->host().release_idle();
  CHECK_EQ(scene.pinned(), scene.pinned_before + kContents.size());
  scene.expect_clean_end();
}

TEST(the_pages_go_also_where_the_driver_keeps_the_segment) {
  Scene scene(true);
  scene.load();
  rig::fail_call(scene.r, "cuMemUnmap");
  scene.r.allocator->free(scene.loaded);
  CHECK_EQ(scene.pinned(), scene.pinned_before);
}

TEST(pages_that_the_driver_does_not_pin_are_read_through_the_ring_or_refused) {
  for (const bool allow_pageable : {true, false}) {
    Scene scene(true);
    rig::Config config = ::config();
    config.host.allow_pageable = allow_pageable;
    scene.r.allocator->configure(config);
    REQUIRE(scene.reserve().ok());
    rig::fail_call(scene.r, "cuMemHostRegister", 1, CUDA_ERROR_NOT_PERMITTED);
    CHECK_EQ(scene.wake().ok(), allow_pageable);
    CHECK_EQ(pinned_pages(scene), std::size_t{0});
    if (!allow_pageable) REQUIRE(scene.wake().ok());
    scene.expect_bytes();
    scene.expect_clean_end();
  }
}

// Pinning makes more than one call, and a refusal of any is a refusal to pin.
TEST(pages_are_read_through_the_ring_whichever_call_of_pinning_is_refused) {
  Scene scene(true);
  REQUIRE(scene.reserve().ok());
  rig::fail_call(scene.r, "cuCtxGetCurrent");
  REQUIRE(scene.r.wake({scene.loaded}).ok());
  CHECK_EQ(pinned_pages(scene), std::size_t{0});
  scene.expect_bytes();
  scene.expect_clean_end();
}

TEST(a_file_that_has_changed_is_refused_before_the_first_unmap) {
  Scene scene;
  scene.load();
  const unsigned char more = 1;
  const auto end = static_cast<off_t>(kContents.size());
  REQUIRE(pwrite(scene.file, &more, 1, end) == 1);
  CHECK(scene.sleep().fault == cumem::Fault::source);
  CHECK(!scene.r.asleep(scene.loaded) && !scene.r.asleep(scene.other));
  scene.expect_bytes();
  scene.expect_clean_end();
}

TEST(a_folder_that_is_missing_is_refused_before_the_first_unmap) {
  Scene scene;
  scene.load();
  rig::Config missing = config();
  missing.file.folder = "/tmp/is/not/there";
  scene.r.allocator->configure(missing);
  const Status status = scene.sleep();
  CHECK(status.fault == cumem::Fault::disk);
  CHECK_EQ(status.error, ENOENT);
  CHECK(!scene.r.asleep(scene.loaded) && !scene.r.asleep(scene.other));
  scene.expect_bytes();
  scene.expect_clean_end();
}

TEST(contents_in_files_are_read_while_their_segments_sleep) {
  Scene scene;
  scene.load();
  scene.r.write(scene.loaded, {9});  // this piece is saved, the others are left to the file
  REQUIRE(scene.sleep().ok());
  auto expect_backup = [&](CUdeviceptr at, const unsigned char* expected) {
    std::vector<unsigned char> found(kBytes);
    auto* const out = reinterpret_cast<std::byte*>(found.data());
    REQUIRE(scene.r.allocator->read_backup({at, kBytes}, out).ok());
    CHECK(std::equal(found.begin() + 1, found.end(), expected + 1));
    CHECK_EQ(int{found[0]}, at == scene.loaded ? 9 : int{kOther[0]});
  };
  CHECK(scene.r.slept.reload_bytes > 0);
  expect_backup(scene.loaded, kContents.data() + kHeader);
  expect_backup(scene.other, kOther.data());
  REQUIRE(ftruncate(scene.file, kHeader) == 0);
  std::byte one{};
  const CUdeviceptr last = scene.loaded + kBytes - 1;
  CHECK(scene.r.allocator->read_backup({last, 1}, &one).fault == cumem::Fault::source);
}

}  // namespace
