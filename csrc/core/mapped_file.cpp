#include "core/mapped_file.h"

#include <sys/mman.h>

#include <utility>

namespace cumem {

MappedFile::MappedFile(const Driver& driver, std::size_t bytes)
    : driver_(driver), bytes_(bytes), pins_((bytes + kPiece - 1) / kPiece) {}

Status MappedFile::make(HostStore& host, const File& file, std::unique_ptr<MappedFile>& out) {
  out.reset();
  std::unique_ptr<MappedFile> made(new MappedFile(host.driver(), file.bytes()));
  Status status = host.files().claim(file, made->claim_);
  if (status.ok()) status = file.map(made->data_);
  if (status.ok()) out = std::move(made);
  return status;
}

MappedFile::~MappedFile() {
  ahead_.reset();
  Status status;
  for (Pin& pin : pins_)
    if (Status one = pin.release(); !one.ok()) status = one;
  // Still pinned: the pages stay, lest the device read elsewhere.
  if (status.ok() && data_ != nullptr) munmap(data_, bytes_);
}

Status MappedFile::pin(std::size_t piece) {
  Pin& pin = pins_[piece];
  if (pin.held()) return {};
  if (!ahead_) ahead_ = std::make_unique<PageMapper>(data_, bytes_);
  const std::size_t start = piece * kPiece;
  const std::size_t bytes = std::min(kPiece, bytes_ - start);
  Status status = pin.take(driver_, data_ + start, bytes, CU_MEMHOSTREGISTER_READ_ONLY);
  if (status.ok()) pinned_bytes_ += bytes;
  // Nothing is left for it to do: the rest is read another way, or there is none.
  if (!status.ok() || pinned_bytes_ == bytes_) ahead_.reset();
  claim_.set(pinned_bytes_ > 0 ? FilePages::State::pinned : FilePages::State::refused);
  return status;
}

}  // namespace cumem
