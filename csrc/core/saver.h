// How do contents get into backups without copying what is there already?
//
// Ranges are cut into pieces. A batch of pieces is digested on the device while
// the batch before it is compared and its changed pieces are copied, so that the
// digests cost no time beside the copies.
#pragma once

#include <cstddef>
#include <vector>

#include "core/digester.h"
#include "core/requests.h"
#include "core/segment.h"
#include "core/transfer.h"

namespace cumem {

class Saver {
 public:
  // `digester` may be null: then every piece that is not declared unchanged is copied.
  Saver(Transfer& transfer, Digester* digester, CleanCheck check)
      : transfer_(transfer), digester_(digester), check_(check) {}

  // The calls below need the device's context to be current, and nothing else may
  // change the contents meanwhile. After a failure copies and digests may still be
  // running: wait for the transfer and the digester before memory goes.

  // Saves every range of `backup`, which must stay where it is until finish().
  // pre: the backup's memory or file has room for the ranges; where backup.filled, it holds
  // what backup.digests describe. `unchanged` counts under CleanCheck::declared.
  Status save(Backup& backup, const std::vector<Range>& unchanged);
  // Compares and submits what is left. The copies may still run.
  Status finish();

 private:
  struct Job {
    Backup* backup;
    std::size_t index;  // of the piece, in backup->digests
    Range range;
    std::size_t offset;  // in the backup
  };
  bool digests() const noexcept { return digester_ != nullptr && check_ == CleanCheck::digest; }
  Status launch();
  Status settle();
  Status copy_changed(const std::vector<Job>& jobs, const Digest* digests);

  Transfer& transfer_;
  Digester* const digester_;
  const CleanCheck check_;
  std::vector<Job> filling_;  // the batch that takes pieces
  std::vector<Job> running_;  // the batch on the device
  std::size_t slot_ = 0;      // of the running batch
};

}  // namespace cumem
