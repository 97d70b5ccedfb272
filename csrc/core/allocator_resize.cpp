// Note [Resize]
//
// Growth first maps everything, then shows it, so that nobody finds a byte that is
// not there; a failure gives back what this call mapped. Memory that goes is hidden
// first, then unmapped: after a refused unmap the segment shows what is still there.
// Asleep segments keep their size: their backups and digests speak of it.
#include <algorithm>
#include <utility>

#include "core/allocator.h"
#include "core/arriving.h"
#include "core/transition.h"

namespace cumem {
namespace {

struct Resizing {
  Segment* segment;
  std::size_t asked;
  std::size_t before;
  std::size_t after;
};

Status refused(const char* what, const Range& wanted) {
  Status status = failure(Fault::invalid, what, wanted.bytes);
  status.address = wanted.address;
  return status;
}

Status select(const ResizeRequest& request, Transition& transition, std::vector<Resizing>& out) {
  for (const Range& wanted : request.segments) {
    Segment* segment = transition.take(wanted.address);
    if (segment == nullptr) return refused("resize of an unknown segment", wanted);
    if (segment->state != SegmentState::awake) return refused("resize of a sleeper", wanted);
    if (segment->source != nullptr) return refused("resize of a loaded file", wanted);
    if (wanted.bytes == 0 || wanted.bytes > segment->capacity())
      return refused("resize beyond what is reserved", wanted);
    out.push_back({segment, wanted.bytes, segment->bytes(), segment->covering(wanted.bytes)});
  }
  return {};
}

// pre: what is to go is hidden, and no work uses it.
Status shrink_all(const std::vector<Resizing>& items) {
  Status first;
  for (const Resizing& item : items) {
    if (item.after >= item.before) continue;
    ContextGuard context(item.segment->device());
    Status status = context.status();
    if (status.ok()) status = item.segment->shrink(item.after);
    if (first.ok()) first = status;
  }
  return first;
}

// On failure what was grown is as before.
Status grow_all(const std::vector<Resizing>& items) {
  for (auto item = items.begin(); item != items.end(); ++item) {
    ContextGuard context(item->segment->device());
    Status status = context.status();
    if (status.ok()) status = item->segment->grow(item->after);
    if (status.ok()) continue;
    for (auto grown = items.begin(); grown != item; ++grown) {
      ContextGuard back(grown->segment->device());
      (void)grown->segment->shrink(grown->before);
    }
    return status;
  }
  return {};
}

std::size_t growth_on(const Device& device, const std::vector<Resizing>& items) {
  std::size_t bytes = 0;
  for (const Resizing& item : items)
    if (&item.segment->device() == &device && item.after > item.before)
      bytes += item.after - item.before;
  return bytes;
}

std::vector<Backup> hide(const std::vector<Resizing>& items) {
  std::vector<Backup> kept;
  for (const Resizing& item : items) {
    kept.push_back(std::exchange(item.segment->backup, Backup{}));
    item.segment->show(std::min(item.before, item.after));
    item.segment->asked_bytes = std::min(item.segment->asked_bytes, item.asked);
  }
  return kept;
}

}  // namespace

Status Allocator::resize(const ResizeRequest& request) {
  std::lock_guard<std::mutex> operation(operation_);
  RelaxedCapture relaxed(*driver_);
  catch_up();
  std::vector<Backup> kept;  // dropped after the mutex is free
  Transition transition(*this);
  std::vector<Resizing> items;
  Status status = select(request, transition, items);
  if (status.ok()) status = transition.refuse_captures();
  const bool shrinks = std::any_of(items.begin(), items.end(),
                                   [](const Resizing& item) { return item.after < item.before; });
  if (status.ok() && shrinks) status = wait_for_devices(transition);
  for (const Device* device : transition.devices()) {
    const std::size_t bytes = growth_on(*device, items);
    ContextGuard context(*device);
    if (status.ok()) status = context.status();
    if (status.ok() && bytes > 0) status = keep_margin(bytes, *device);
  }
  if (status.ok()) status = grow_all(items);
  if (status.ok()) {
    transition.publish([&] { kept = hide(items); });
    status = shrink_all(items);
  }
  transition.publish([&] {
    for (const Resizing& item : items) {
      item.segment->show();
      if (status.ok()) item.segment->asked_bytes = item.asked;
    }
  });
  add_free_bytes(device_if_open(status.device), status);
  return status;
}

}  // namespace cumem
