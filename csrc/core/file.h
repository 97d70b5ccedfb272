// How does the core read and write files, and know one again?
//
// A File is held open from the first use on, so that neither a new name nor a
// deletion takes it away. What it cannot be saved from is a change of its own bytes:
// prove() says whether there was one.
#pragma once

#include <sys/stat.h>

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <utility>

#include "core/status.h"
#include "digest/digest.h"

namespace cumem {

class File {
 public:
  // Holds a descriptor of its own of an open file, and remembers what the file is:
  // device, inode, length, time of the last change, and the digest of its first
  // `header_bytes`. `path` is for messages. On failure `out` is empty.
  static Status adopt(int descriptor, std::string path, std::size_t header_bytes,
                      std::shared_ptr<File>& out);
  // A new file of `bytes` in `folder` that nobody else can open: without a name, and
  // its owner's alone from its first moment. Its room is taken at once where the file
  // system can. On failure `out` is empty and nothing is left.
  static Status create(const std::string& folder, std::size_t bytes, std::shared_ptr<File>& out);
  ~File();
  File(const File&) = delete;
  File& operator=(const File&) = delete;

  // All of the bytes or a failure. Several threads may call these at once.
  Status read(std::uint64_t offset, std::byte* data, std::size_t bytes) const;
  Status write(std::uint64_t offset, const std::byte* data, std::size_t bytes) const;
  // Maps all of it for reading, for the caller to unmap. pre: it was adopted.
  Status map(std::byte*& out) const;
  // Which file it is, by whatever name: device and inode. pre: the same.
  using Id = std::pair<dev_t, ino_t>;
  Id id() const noexcept { return {identity_.st_dev, identity_.st_ino}; }
  // How long it was when it was adopted.
  std::size_t bytes() const noexcept { return static_cast<std::size_t>(identity_.st_size); }
  // Is it of a file system whose files are memory?
  bool in_memory() const noexcept;
  // Is it what it was when it was adopted?
  Status prove() const;
  // Gives the room of a part back to the file system, where that is possible.
  void drop(std::uint64_t offset, std::size_t bytes) const noexcept;

  const std::shared_ptr<const std::string>& shared_path() const noexcept { return path_; }

 private:
  File(int descriptor, std::string path, Fault fault)
      : descriptor_(descriptor),
        path_(std::make_shared<const std::string>(std::move(path))),
        fault_(fault) {}
  Status refused(const char* call, std::size_t bytes) const;  // with errno
  Status wrong(const char* what, std::size_t bytes) const;
  Status digest_header(Digest& out) const;

  const int descriptor_;
  const std::shared_ptr<const std::string> path_;
  const Fault fault_;
  struct stat identity_ = {};
  std::size_t header_bytes_ = 0;
  Digest header_;
};

// Owns a part of a file: what it held is nobody's when it goes.
class FileBlock {
 public:
  FileBlock() = default;
  FileBlock(std::shared_ptr<File> file, std::uint64_t offset, std::size_t bytes) noexcept
      : file_(std::move(file)), offset_(offset), bytes_(bytes) {}
  FileBlock(FileBlock&& other) noexcept { *this = std::move(other); }
  FileBlock& operator=(FileBlock&& other) noexcept;
  ~FileBlock();

  const File& file() const noexcept { return *file_; }
  std::uint64_t offset() const noexcept { return offset_; }
  std::size_t bytes() const noexcept { return bytes_; }

 private:
  std::shared_ptr<File> file_;
  std::uint64_t offset_ = 0;
  std::size_t bytes_ = 0;
};

}  // namespace cumem
