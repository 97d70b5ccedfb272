// Is host memory that the pages of files take not promised to somebody else?
#include <fcntl.h>
#include <unistd.h>

#include <cstdlib>
#include <limits>
#include <vector>

#include "core/mapped_file.h"
#include "core_rig.h"
#include "failures.h"

namespace {

using cumem::Fault;
using cumem::MappedFile;
using cumem::Status;
using rig::Rig;

// A file on a disk, of zeros that take no room, held open and without a name.
std::shared_ptr<cumem::File> sparse(std::size_t bytes) {
  char name[] = "/tmp/cumem-test-XXXXXX";
  const int descriptor = mkostemp(name, O_CLOEXEC);
  REQUIRE(descriptor >= 0);
  unlink(name);
  REQUIRE(ftruncate(descriptor, static_cast<off_t>(bytes)) == 0);
  std::shared_ptr<cumem::File> file;
  REQUIRE(cumem::File::adopt(descriptor, "model", 0, file).ok());
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
