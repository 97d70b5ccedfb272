// Note [Sleep is all or nothing]
//
// Three steps, and only the last one changes anything:
//   1. take every byte of host memory that the plan needs;
//   2. wait for the devices, save every range, wait for the copies;
//   3. segment by segment: publish "asleep" with its backup, unmap, release.
// A failure in 1 or 2 drops what was taken and leaves everything as it was. The
// driver may refuse an unmap in 3; then this segment is awake if nothing of it was
// unmapped, else asleep with an exact count of mapped bytes and a whole backup;
// the later ones are awake and untouched, and calling again goes on from there.
//
// A segment that woke keeps its backup. When it goes to sleep again with the same
// ranges, only pieces that differ are copied into it (saver.h).
#include <algorithm>
#include <utility>

#include "core/allocator.h"
#include "core/leaving.h"
#include "core/saver.h"
#include "core/transition.h"

namespace cumem {
namespace {

Status try_to_take_host_memory(HostStore& host, std::vector<Leaving>& leaving) {
  std::size_t bytes = 0;
  for (const Leaving& item : leaving)
    if (item.wants_host_memory()) bytes += host.rounded(total_bytes(item.backup.ranges));
  for (Leaving& item : leaving) {
    if (!item.wants_host_memory()) continue;
    const Device& device = item.segment->device();
    // The first call takes for all, so that one admission decides.
    if (Status status = host.reserve(std::exchange(bytes, 0), device); !status.ok()) return status;
    Status status = host.take(total_bytes(item.backup.ranges), device, item.backup.host);
    if (!status.ok()) return status;
  }
  return {};
}

// pre: the device's context is current.
Status save_on(Device& device, std::vector<Leaving>& leaving, Saver& saver) {
  for (Leaving& item : leaving) {
    if (&item.segment->device() != &device || !item.wants_copy()) continue;
    if (Status status = saver.save(item.backup, item.unchanged); !status.ok()) return status;
  }
  return saver.finish();
}

}  // namespace

// Backups of segments that stay awake, and slots, only save time: they go before a sleep fails.
Status Allocator::take_host_memory(std::vector<Leaving>& leaving) {
  Status status = try_to_take_host_memory(host_, leaving);
  const bool short_of_it = status.fault == Fault::host_memory;
  if (!short_of_it || !make_room(&HostStore::release_unfit).more) return status;
  return try_to_take_host_memory(host_, leaving);
}

// What the file still holds needs no host memory, so this comes before it is taken.
Status Allocator::leave_to_sources(std::vector<Leaving>& leaving, CleanCheck check,
                                   Transition& transition) {
  const bool any = std::any_of(leaving.begin(), leaving.end(),
                               [](const Leaving& item) { return item.segment->source != nullptr; });
  if (!any) return {};
  if (Status status = wait_for_devices(transition); !status.ok()) return status;
  for (Leaving& item : leaving) {
    Device& device = item.segment->device();
    ContextGuard context(device);
    Status status = context.status();
    if (status.ok()) status = leave_to_source(item, check, digester_of(device));
    if (!status.ok()) return status;
  }
  return {};
}

Digester* Allocator::digester_of(const Device& device) {
  std::lock_guard<std::mutex> lock(mutex_);
  auto found = digesters_.find(device.ordinal());
  return found == digesters_.end() ? nullptr : found->second.get();
}

bool Allocator::all_digest(const std::vector<Device*>& devices) {
  return std::all_of(devices.begin(), devices.end(),
                     [this](const Device* device) { return digester_of(*device) != nullptr; });
}

Status Allocator::save_all(const std::vector<Device*>& devices, std::vector<Leaving>& leaving,
                           CleanCheck check, Transfers& transfers) {
  for (Device* device : devices) transfers.on(*device);
  return on_each(devices, [&](Device& device) {
    Saver saver(transfers.on(device), digester_of(device), check);
    return save_on(device, leaving, saver);
  });
}

Status Allocator::sleep(const SleepRequest& request, SleepResult& result) {
  std::lock_guard<std::mutex> operation(operation_);
  const HostUsage before = host_.usage();
  Status status = sleep_alone(request, result);
  const HostUsage after = host_.usage();
  // Both are parts of "copy".
  result.phases["touch"] = std::max(0.0, after.touch_seconds - before.touch_seconds);
  result.phases["pin"] = std::max(0.0, after.pin_seconds - before.pin_seconds);
  // Memory that could not be pinned is of no use to the next try.
  if (!status.ok()) host_.release_cold();
  result.pageable_bytes = after.pageable_bytes;
  return status;
}

Status Allocator::sleep_alone(const SleepRequest& request, SleepResult& result) {
  RelaxedCapture relaxed(*driver_);
  catch_up();
  Transition transition(*this);
  std::vector<Leaving> leaving;
  Transfers transfers(Device::Direction::to_host, file_means());  // after what it copies: it waits
                                                                  // before the backups go
  Stopwatch watch(result.phases);

  Status status = select_leaving(request, transition, leaving);
  if (status.ok()) status = transition.refuse_captures();
  watch.lap("plan");
  if (status.ok()) status = leave_to_sources(leaving, request.clean_check, transition);
  watch.lap("source");
  if (status.ok()) take_kept_backups(leaving, transition);
  if (status.ok()) status = take_host_memory(leaving);
  if (status.ok()) status = take_disk(leaving, file_means().config.folder);
  watch.lap("host_memory");
  if (status.ok()) status = wait_for_devices(transition);
  watch.lap("wait");
  if (status.ok()) status = save_all(transition.devices(), leaving, request.clean_check, transfers);
  if (status.ok()) status = transfers.wait();
  watch.lap("copy");
  if (status.ok() && request.verify) status = verify_saved(leaving, request);
  if (request.verify) watch.lap("verify");
  result.copied_bytes = transfers.copied_bytes();
  result.digested = request.clean_check == CleanCheck::digest && all_digest(transition.devices());
  for (auto item = leaving.begin(); item != leaving.end() && status.ok(); ++item)
    status = release(*item, transition, result);
  watch.lap("release");
  return status;
}

}  // namespace cumem
