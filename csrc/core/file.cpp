#include "core/file.h"

#include <fcntl.h>
#include <linux/magic.h>
#include <sys/mman.h>
#include <sys/vfs.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdlib>
#include <utility>
#include <vector>

namespace cumem {
namespace {

bool same(const struct stat& left, const struct stat& right) noexcept {
  return left.st_dev == right.st_dev && left.st_ino == right.st_ino &&
         left.st_size == right.st_size && left.st_mtim.tv_sec == right.st_mtim.tv_sec &&
         left.st_mtim.tv_nsec == right.st_mtim.tv_nsec;
}

// Not every file system can make a file without a name; then it loses it at once.
int open_private(const std::string& folder) {
  const int nameless = open(folder.c_str(), O_TMPFILE | O_RDWR | O_CLOEXEC, 0600);
  if (nameless >= 0 || (errno != EOPNOTSUPP && errno != EISDIR && errno != EINVAL)) return nameless;
  std::string name = folder + "/.cumem-XXXXXX";
  const int named = mkostemp(name.data(), O_CLOEXEC);
  if (named >= 0) unlink(name.c_str());
  return named;
}

// Takes the room now: a folder that is full must be known before anything is unmapped.
int take_room(int descriptor, std::size_t bytes) noexcept {
  const auto length = static_cast<off_t>(bytes);
  int code = 0;
  do code = fallocate(descriptor, 0, 0, length);
  while (code != 0 && errno == EINTR);
  if (code == 0 || errno != EOPNOTSUPP) return code;
  return ftruncate(descriptor, length);
}

}  // namespace

Status File::adopt(int descriptor, std::string path, std::size_t header_bytes,
                   std::shared_ptr<File>& out) {
  out.reset();
  const int own = fcntl(descriptor, F_DUPFD_CLOEXEC, 0);
  const int error = errno;
  std::shared_ptr<File> file(new File(own, std::move(path), Fault::source));
  errno = error;
  if (own < 0) return file->refused("fcntl", 0);
  if (fstat(own, &file->identity_) != 0) return file->refused("fstat", 0);
  file->header_bytes_ = header_bytes;
  if (Status status = file->digest_header(file->header_); !status.ok()) return status;
  // Advice only. What is read once is not read ahead of by too much.
  (void)posix_fadvise(own, 0, 0, POSIX_FADV_SEQUENTIAL);
  out = std::move(file);
  return {};
}

Status File::create(const std::string& folder, std::size_t bytes, std::shared_ptr<File>& out) {
  out.reset();
  const int own = open_private(folder);
  const int error = errno;
  std::shared_ptr<File> file(new File(own, folder, Fault::disk));
  errno = error;
  if (own < 0) return file->refused("open", bytes);
  if (take_room(own, bytes) != 0) return file->refused("fallocate", bytes);
  out = std::move(file);
  return {};
}

File::~File() {
  if (descriptor_ >= 0) close(descriptor_);
}

Status File::refused(const char* call, std::size_t bytes) const {
  const int error = errno;
  Status status = failure(fault_, call, bytes);
  status.error = error;
  status.path = path_;
  return status;
}

Status File::wrong(const char* what, std::size_t bytes) const {
  Status status = failure(fault_, what, bytes);
  status.path = path_;
  return status;
}

Status File::read(std::uint64_t offset, std::byte* data, std::size_t bytes) const {
  while (bytes > 0) {
    const ssize_t got = pread(descriptor_, data, bytes, static_cast<off_t>(offset));
    if (got < 0 && errno == EINTR) continue;
    if (got < 0) return refused("pread", bytes);
    if (got == 0) return wrong("a file that was cut short", bytes);
    const auto step = static_cast<std::size_t>(got);
    data += step;
    offset += step;
    bytes -= step;
  }
  return {};
}

Status File::write(std::uint64_t offset, const std::byte* data, std::size_t bytes) const {
  while (bytes > 0) {
    const ssize_t put = pwrite(descriptor_, data, bytes, static_cast<off_t>(offset));
    if (put < 0 && errno == EINTR) continue;
    if (put < 0) return refused("pwrite", bytes);
    const auto step = static_cast<std::size_t>(put);
    data += step;
    offset += step;
    bytes -= step;
  }
  return {};
}

// Shared, so that the pages are those of the file and not copies.
Status File::map(std::byte*& out) const {
  void* data = mmap(nullptr, bytes(), PROT_READ, MAP_SHARED, descriptor_, 0);
  if (data == MAP_FAILED) return refused("mmap", bytes());
  out = static_cast<std::byte*>(data);
  return {};
}

bool File::in_memory() const noexcept {
  struct statfs system = {};
  if (fstatfs(descriptor_, &system) != 0) return false;
  const auto kind = static_cast<unsigned long>(system.f_type);
  return kind == TMPFS_MAGIC || kind == RAMFS_MAGIC || kind == HUGETLBFS_MAGIC;
}

Status File::digest_header(Digest& out) const {
  std::vector<std::byte> header(header_bytes_);
  Status status = read(0, header.data(), header.size());
  if (status.ok()) out = digest_of(header.data(), header.size());
  return status;
}

Status File::prove() const {
  struct stat now = {};
  Digest header;
  if (fstat(descriptor_, &now) != 0) return refused("fstat", 0);
  if (!same(identity_, now)) return wrong("a file that has changed", 0);
  if (Status status = digest_header(header); !status.ok()) return status;
  return header == header_ ? Status{} : wrong("a file that has changed", header_bytes_);
}

void File::drop(std::uint64_t offset, std::size_t bytes) const noexcept {
  (void)fallocate(descriptor_, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE,
                  static_cast<off_t>(offset), static_cast<off_t>(bytes));
}

FileBlock& FileBlock::operator=(FileBlock&& other) noexcept {
  std::swap(file_, other.file_);
  std::swap(offset_, other.offset_);
  std::swap(bytes_, other.bytes_);
  return *this;
}

FileBlock::~FileBlock() {
  if (file_) file_->drop(offset_, bytes_);
}

}  // namespace cumem
