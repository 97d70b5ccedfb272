// How does the device fetch a file's bytes without a copy of them?
//
// The file is mapped and its pages are pinned where they are, in the system's page cache,
// so that copies to the device read them there. It takes no memory that the file did not
// take before, and processes that load the same file share its pages; but while they are
// pinned the system cannot have them back. Pinning is slower than reading through the ring
// (measured: 12 to 34 GB/s against 38 to 48) and is done once; copies from then on need neither.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include "core/driver.h"
#include "core/file.h"
#include "core/file_pages.h"
#include "core/host_store.h"
#include "core/page_mapper.h"
#include "core/pin.h"
#include "core/status.h"

namespace cumem {

class MappedFile {
 public:
  // Why a visit ended early, if it did.
  struct Visited {
    Status pinning;  // the pages that come next could not be pinned: read them another way
    Status copying;  // what visit() said
  };

  // Maps the file, and pins nothing yet. Refuses where the host could not hold its pages
  // beside all else. On failure `out` is empty. `host` outlives it.
  static Status make(HostStore& host, const File& file, std::unique_ptr<MappedFile>& out);
  ~MappedFile();
  MappedFile(const MappedFile&) = delete;
  MappedFile& operator=(const MappedFile&) = delete;

  // Calls visit(data, bytes) -> Status for each part of [offset, offset + bytes) that one
  // copy may read, after its pages were pinned. What is pinned stays so. pre: the range lies
  // in the file, which has its length; a context is current; one thread at a time.
  template <class Visit>
  Visited visit(std::uint64_t offset, std::size_t bytes, const Visit& visit);

  std::size_t pinned_bytes() const noexcept { return pinned_bytes_; }

 private:
  static constexpr std::size_t kPiece = std::size_t{256} << 20;  // pinned in one call
  MappedFile(const Driver& driver, std::size_t bytes);
  Status pin(std::size_t piece);

  const Driver& driver_;
  FilePages::Claim claim_;
  std::byte* data_ = nullptr;
  const std::size_t bytes_;
  std::unique_ptr<PageMapper> ahead_;  // from the first pin to the last
  std::vector<Pin> pins_;              // one a piece
  std::atomic<std::size_t> pinned_bytes_{0};
};

template <class Visit>
MappedFile::Visited MappedFile::visit(std::uint64_t offset, std::size_t bytes, const Visit& visit) {
  while (bytes > 0) {
    const std::size_t piece = offset / kPiece;
    const std::size_t step = std::min<std::size_t>(bytes, (piece + 1) * kPiece - offset);
    if (Status status = pin(piece); !status.ok()) return {status, {}};
    if (Status status = visit(data_ + offset, step); !status.ok()) return {{}, status};
    offset += step;
    bytes -= step;
  }
  return {};
}

}  // namespace cumem
