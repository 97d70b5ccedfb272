#include "core/mapped_file.h"

#include <sys/mman.h>

#include "core/host_piece.h"

namespace cumem {

MappedFile::MappedFile(const Driver& driver, std::byte* data, std::size_t bytes)
    : driver_(driver), data_(data), bytes_(bytes), pins_((bytes + kPiece - 1) / kPiece) {}

// The pages of a file in memory are counted as used already.
Status MappedFile::make(const Driver& driver, const File& file, std::unique_ptr<MappedFile>& out) {
  out.reset();
  const std::size_t free_bytes = available_host_bytes();
  if (!file.in_memory() && file.bytes() > free_bytes) {
    Status status = failure(Fault::host_memory, "pinning the pages of a file", file.bytes());
    status.free_bytes = free_bytes;
    return status;
  }
  std::byte* data = nullptr;
  if (Status status = file.map(data); !status.ok()) return status;
  out.reset(new MappedFile(driver, data, file.bytes()));
  return {};
}

MappedFile::~MappedFile() {
  Status status;
  for (Pin& pin : pins_)
    if (Status one = pin.release(); !one.ok()) status = one;
  // Still pinned: the pages stay, lest the device read elsewhere.
  if (status.ok()) munmap(data_, bytes_);
}

Status MappedFile::pin(std::size_t piece) noexcept {
  Pin& pin = pins_[piece];
  if (pin.held()) return {};
  const std::size_t start = piece * kPiece;
  const std::size_t bytes = std::min(kPiece, bytes_ - start);
  Status status = pin.take(driver_, data_ + start, bytes, CU_MEMHOSTREGISTER_READ_ONLY);
  if (status.ok()) pinned_bytes_ += bytes;
  return status;
}

}  // namespace cumem
