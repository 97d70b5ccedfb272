// How do bytes move between a device and its backups?
//
// Pinned host memory: on the device's copy stream for the direction, in as few copies as the
// ranges and the arena's spans allow, small ones together. Everything is submitted first;
// wait() ends the work. Memory that is not pinned, and files: through Staging. The caller has
// waited for the device before, so there is nothing on other streams to order against.
#pragma once

#include <cuda.h>

#include <cstddef>
#include <vector>

#include "core/copy_batch.h"
#include "core/device.h"
#include "core/event.h"
#include "core/host_store.h"
#include "core/mapped_file.h"
#include "core/segment.h"
#include "core/staging.h"
#include "core/status.h"

namespace cumem {

class Transfer {
 public:
  Transfer(Device& device, Device::Direction direction, const FileMeans& means)
      : device_(device),
        direction_(direction),
        means_(means),
        batch_(device, direction),
        staging_(device, means) {}
  Transfer(const Transfer&) = delete;
  Transfer& operator=(const Transfer&) = delete;

  // The calls below need the device's context to be current.

  // Submits copies between all ranges of `backup` and its host block (of the last ones some
  // may be kept back for company); between them and pageable memory or a file on disk it
  // moves them, and of these only the last copies may still run.
  // After a failure copies may still be running: stop() before the memory goes.
  Status copy(const Backup& backup);
  // The same for one range whose bytes start at `offset` of the backup.
  Status copy(const Range& range, const Backup& backup, std::size_t offset);
  // Reads these parts of a file; the last copies may still run.
  Status read(const File& file, const std::vector<FilePart>& parts);
  // The same from the file's own pages; what is small, and what cannot be pinned where the
  // configuration allows that, is read as above.
  Status read(const File& file, MappedFile& pages, const std::vector<FilePart>& parts);

  // Submits a fill of a whole range with one byte value.
  Status fill(const Range& range, unsigned char value);

  // Submits what was kept back.
  Status submit();

  // Puts `event` behind everything given so far.
  Status mark(Event& event);

  // Waits for everything given. Safe to call when nothing was. After a refusal
  // too nothing runs any more, unless the driver refuses twice. Where copies could not be
  // submitted, every call fails until stop(): whoever gave them may ask later than others.
  Status wait();
  // The same without what was kept back: that is forgotten.
  Status stop();

  std::size_t copied_bytes() const noexcept { return copied_bytes_; }

 private:
  Status open();
  Status move(const FileBlock& disk, std::vector<FilePart> parts);
  Status copy(const std::vector<FilePart>& parts, const HostBlock& host);
  Status stage(const std::vector<FilePart>& parts, const HostBlock& host);
  Status copy_unpinned(const FilePart& part, const HostBlock& host);
  MappedFile::Visited fetch(FilePart& part, MappedFile& pages, std::vector<FilePart>& others);
  Status wait_for_driver();

  Device& device_;
  const Device::Direction direction_;
  const FileMeans means_;
  CUstream stream_ = nullptr;  // the device's; set by the first submission
  std::size_t copied_bytes_ = 0;
  CopyBatch batch_;
  Staging staging_;
};

}  // namespace cumem
