// The checks that sleep and wake make when they are asked to verify.
#include "core/allocator.h"
#include "core/leaving.h"
#include "core/transition.h"
#include "core/verify.h"

namespace cumem {

Status Allocator::verify_saved(std::vector<Leaving>& leaving, const SleepRequest& request) {
  for (Leaving& item : leaving) {
    if (!item.wants_copy()) continue;
    Device& device = item.segment->device();
    ContextGuard context(device);
    if (!context.status().ok()) return context.status();
    if (request.clean_check != CleanCheck::digest || item.backup.digests.empty()) {
      Status status =
          digest_device(device, digester_of(device), item.backup.ranges, item.backup.digests);
      if (!status.ok()) return status;
    }
    std::vector<Digest> saved;
    Status status = digest_backup(item.backup, saved);
    if (status.ok()) status = compare(item.backup, saved, "backup", device.ordinal());
    if (!status.ok()) return status;
  }
  return {};
}

Status Allocator::verify_restored(const std::vector<Segment*>& waking, bool verify,
                                  WakeResult& result) {
  if (!verify) return {};
  Stopwatch watch(result.phases);
  Status status;
  for (Segment* segment : waking) {
    Device& device = segment->device();
    ContextGuard context(device);
    std::vector<Digest> now;
    // Digests are the backup's own; without them the backup itself is the measure.
    status = context.status();
    if (status.ok() && segment->backup.digests.empty())
      status = digest_backup(segment->backup, segment->backup.digests);
    if (status.ok())
      status = digest_device(device, digester_of(device), segment->backup.ranges, now);
    if (status.ok()) status = compare(segment->backup, now, "memory after wake", device.ordinal());
    if (!status.ok()) break;
  }
  watch.lap("verify");
  return status;
}

}  // namespace cumem
