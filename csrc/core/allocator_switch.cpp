// Switch: sleep and wake in one operation. Note [Switch] is in exchange.h.
#include <utility>

#include "core/allocator.h"
#include "core/arriving.h"
#include "core/exchange.h"
#include "core/leaving.h"
#include "core/transition.h"

namespace cumem {

Status Allocator::exchange(const SwitchRequest& request, SwitchResult& result) {
  std::lock_guard<std::mutex> operation(operation_);
  Status status = exchange_alone(request, result);
  result.sleep.pageable_bytes = host_.usage().pageable_bytes;
  // By now what the call held has gone back to the arena.
  if (!host_.config().retain)
    host_.release_idle();
  else if (!status.ok())
    host_.release_cold();
  add_free_bytes(device_if_open(status.device), status);
  return status;
}

// Pinning is put off until a copy needs it. Where its refusal is an error it must come
// before the first unmap.
Status Allocator::pin_if_required(const std::vector<Leaving>& leaving) {
  if (host_.config().allow_pageable || leaving.empty()) return {};
  ContextGuard context(leaving.front().segment->device());
  return context.status().ok() ? host_.make_ready() : context.status();
}

Status Allocator::exchange_alone(const SwitchRequest& request, SwitchResult& result) {
  RelaxedCapture relaxed(*driver_);
  catch_up();
  const bool retain = host_.config().retain;
  std::vector<Backup> spent;  // dropped last
  Transition transition(*this);
  std::vector<Leaving> leaving;
  Stopwatch watch(result.sleep.phases);

  Status status = select_leaving(request.sleep, transition, leaving);
  const std::vector<Segment*> arriving = select_arriving(request.wake, transition);
  if (status.ok()) status = transition.refuse_captures();
  if (status.ok()) status = leave_to_sources(leaving, request.sleep.clean_check, transition);
  if (status.ok()) take_kept_backups(leaving, transition);
  if (status.ok()) status = take_host_memory(leaving);
  if (status.ok()) status = take_disk(leaving, file_means().config.folder);
  if (status.ok()) status = pin_if_required(leaving);
  if (status.ok()) status = wait_for_devices(transition);
  watch.lap("plan");
  if (!status.ok()) return status;
  std::vector<Segment*> arrived;
  status = exchange_all(request, leaving, arriving, transition, result, arrived);
  publish_awake(arrived, retain, transition, result.wake, spent);
  return status;
}

Status Allocator::exchange_all(const SwitchRequest& request, std::vector<Leaving>& leaving,
                               const std::vector<Segment*>& arriving, Transition& transition,
                               SwitchResult& result, std::vector<Segment*>& arrived) {
  Transfers out(Device::Direction::to_host, file_means());
  Transfers in(Device::Direction::to_device, file_means());
  const std::vector<Device*> devices = transition.devices();
  for (Device* device : devices) {
    out.on(*device);
    in.on(*device);
  }
  std::mutex results;
  Status status = on_each(devices, [&](Device& device) {
    Saver saver(out.on(device), digester_of(device), request.sleep.clean_check);
    Exchange exchange(device, saver, out.on(device), in.on(device), digester_of(device),
                      transition);
    for (Leaving& item : leaving)
      if (&item.segment->device() == &device) exchange.leave(item);
    for (Segment* segment : arriving)
      if (&segment->device() == &device) exchange.arrive(*segment);
    SleepResult slept;
    Status one = exchange.run(request.wake, slept);
    std::lock_guard<std::mutex> lock(results);
    result.sleep.freed_bytes += slept.freed_bytes;
    result.sleep.disk_bytes += slept.disk_bytes;
    result.sleep.reload_bytes += slept.reload_bytes;
    for (const auto& [phase, seconds] : slept.phases) result.sleep.phases[phase] += seconds;
    result.sleep.segments.insert(result.sleep.segments.end(), slept.segments.begin(),
                                 slept.segments.end());
    arrived.insert(arrived.end(), exchange.arrived().begin(), exchange.arrived().end());
    return one;
  });
  result.sleep.copied_bytes = out.copied_bytes();
  result.sleep.digested = request.sleep.clean_check == CleanCheck::digest && all_digest(devices);
  result.wake.restored_bytes = in.copied_bytes();
  return status;
}

}  // namespace cumem
