// Is host memory that the pages of files take not promised to somebody else?
#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstdlib>
#include <fstream>
#include <limits>
#include <thread>
#include <vector>

#include "core/mapped_file.h"
#include "core_rig.h"
#include "failures.h"

namespace {

using cumem::Fault;
using cumem::MappedFile;
using cumem::Status;
using rig::Rig;

constexpr std::size_t kPage = 4096;

// A file on a disk, of zeros that take no room, held open and without a name. `writable` gets
// a descriptor of it for the caller to close.
std::shared_ptr<cumem::File> sparse(std::size_t bytes, int* writable = nullptr) {
  char name[] = "/tmp/cumem-test-XXXXXX";
  const int descriptor = mkostemp(name, O_CLOEXEC);
  REQUIRE(descriptor >= 0);
  unlink(name);
  REQUIRE(ftruncate(descriptor, static_cast<off_t>(bytes)) == 0);
  std::shared_ptr<cumem::File> file;
  REQUIRE(cumem::File::adopt(descriptor, "model", 0, file).ok());
  if (writable != nullptr)
    *writable = descriptor;
  else
    close(descriptor);
  if (file->in_memory()) SKIP("/tmp is in memory");
  return file;
}

struct Scene {
  Rig r;
  cumem::HostStore& host = r.allocator->host();

  std::size_t left() { return host.files().available(); }
  Status map(const cumem::File& file, std::unique_ptr<MappedFile>& out) {
    return MappedFile::make(host, file, out);
  }
};

TEST(files_find_room_for_their_pages_together_or_not_at_all) {
  Scene scene;
  const std::size_t most = scene.left() / 5 * 3;
  const auto one = sparse(most);
  const auto other = sparse(most);
  std::unique_ptr<MappedFile> first, again, second;
  REQUIRE(scene.map(*one, first).ok());
  const Status status = scene.map(*other, second);
  CHECK(status.fault == Fault::host_memory && second == nullptr);
  CHECK(status.free_bytes < most);
  CHECK(scene.map(*one, again).ok());  // shares the pages of the first
  first.reset();
  CHECK(!scene.map(*other, second).ok());
  again.reset();
  CHECK(scene.map(*other, second).ok());
}

TEST(backups_find_no_room_where_a_file_has_its_pages) {
  Scene scene;
  const std::size_t free_bytes = scene.left();
  const auto file = sparse(free_bytes / 2);
  std::unique_ptr<MappedFile> mapped;
  REQUIRE(scene.map(*file, mapped).ok());
  cumem::Device* device = nullptr;
  REQUIRE(scene.r.allocator->device(0, &device).ok());
  // More than there can be: touching what is admitted would take minutes.
  const Status status = scene.host.reserve(std::numeric_limits<std::size_t>::max() / 4, *device);
  CHECK(status.fault == Fault::host_memory);
  CHECK(status.free_bytes < free_bytes * 3 / 4);
}

// How many of the pages of [data, data + bytes) are in memory?
std::size_t pages_there(std::byte* data, std::size_t bytes) {
  std::vector<unsigned char> there(bytes / kPage);
  REQUIRE(mincore(data, bytes, there.data()) == 0);
  return static_cast<std::size_t>(
      std::count_if(there.begin(), there.end(), [](unsigned char one) { return (one & 1) != 0; }));
}

TEST(pages_are_there_ahead_of_the_pins_that_need_them) {
  Scene scene;
  constexpr std::size_t most = 320 * kMiB;  // more than is pinned at once
  const auto file = sparse(most);
  std::byte* data = nullptr;
  REQUIRE(file->map(data).ok());
  if (madvise(data, kPage, 22) != 0) SKIP("this system maps no pages ahead");
  std::unique_ptr<MappedFile> mapped;
  REQUIRE(scene.map(*file, mapped).ok());
  CHECK(pages_there(data, most) < most / kPage / 2);
  REQUIRE(mapped->visit(0, 1, [](std::byte*, std::size_t) { return Status{}; }).pinning.ok());
  for (int waited = 0; pages_there(data, most) < most / kPage && waited < 1000; ++waited)
    std::this_thread::sleep_for(std::chrono::milliseconds(10));
  CHECK_EQ(pages_there(data, most), most / kPage);
  munmap(data, most);
}

std::size_t address_space() {
  std::size_t pages = 0;
  std::ifstream("/proc/self/statm") >> pages;
  return pages * kPage;
}

// A thread that nobody has joined keeps its stack: 8 MiB of addresses, and the pages it used.
TEST(a_file_that_is_pinned_keeps_no_threads) {
  Scene scene;
  std::vector<std::unique_ptr<MappedFile>> pinned(28);
  std::size_t before = 0;
  for (std::size_t i = 0; i < pinned.size(); ++i) {
    if (i == 4) before = address_space();  // by then what threads share is there
    const auto file = sparse(kMiB);
    REQUIRE(scene.map(*file, pinned[i]).ok());
    REQUIRE(pinned[i]->visit(0, 1, [](std::byte*, std::size_t) { return Status{}; }).pinning.ok());
  }
  CHECK(address_space() < before + 400 * kMiB);
}

TEST(a_file_that_is_cut_short_ends_no_process_while_its_pages_are_mapped) {
  Scene scene;
  int writable = -1;
  const auto file = sparse(64 * kMiB, &writable);
  std::unique_ptr<MappedFile> mapped;
  REQUIRE(scene.map(*file, mapped).ok());
  REQUIRE(ftruncate(writable, kPage) == 0);
  close(writable);
  (void)mapped->visit(0, 1, [](std::byte*, std::size_t) { return Status{}; });
  mapped.reset();  // waits for the threads that were told where the file ends
  scene.r.expect_empty();
}

TEST(pages_that_the_driver_does_not_pin_stay_the_systems) {
  Scene scene;
  constexpr std::size_t most = 512 * kMiB;
  const std::size_t piece = 256 * kMiB;
  const auto file = sparse(most);
  std::unique_ptr<MappedFile> mapped;
  const auto fetch = [&](std::uint64_t offset) {
    return mapped->visit(offset, 1, [](std::byte*, std::size_t) { return Status{}; }).pinning;
  };
  const std::size_t before = scene.left();
  const auto counts = [&] { return scene.left() + most / 2 < before; };
  REQUIRE(scene.map(*file, mapped).ok());
  CHECK(counts());
  rig::fail_call(scene.r, "cuMemHostRegister", 1, CUDA_ERROR_NOT_PERMITTED);
  CHECK(!fetch(0).ok());
  CHECK(!counts());
  REQUIRE(fetch(piece).ok());
  CHECK(counts());
  mapped.reset();
  CHECK(!counts());
  scene.r.expect_empty();
}

}  // namespace
