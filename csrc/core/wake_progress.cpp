#include "core/wake_progress.h"

#include <iterator>
#include <utility>
#include <vector>

namespace cumem {

void WakeProgress::expect(const Range& segment) {
  std::lock_guard<std::mutex> lock(mutex_);
  entries_[segment.address].range = segment;
}

void WakeProgress::submitted(const Segment& segment, Event event) {
  auto shared = std::make_shared<const Event>(std::move(event));
  std::lock_guard<std::mutex> lock(mutex_);
  Entry& entry = entries_[segment.address()];
  entry.range = {segment.address(), segment.bytes()};
  entry.device = &segment.device();
  entry.event = std::move(shared);
  changed_.notify_all();
}

void WakeProgress::arrived(const Segment& segment) {
  std::shared_ptr<const Event> done;  // goes when the mutex is free
  std::lock_guard<std::mutex> lock(mutex_);
  Entry& entry = entries_[segment.address()];
  entry.arrived = true;
  std::swap(done, entry.event);
  changed_.notify_all();
}

void WakeProgress::finish(const Status& status) {
  std::vector<std::shared_ptr<const Event>> done;
  std::lock_guard<std::mutex> lock(mutex_);
  if (finished_) return;
  finished_ = true;
  status_ = status;
  for (auto& [address, entry] : entries_) done.push_back(std::move(entry.event));
  changed_.notify_all();
}

WakeProgress::Entry* WakeProgress::around(CUdeviceptr address) {
  auto next = entries_.upper_bound(address);
  if (next == entries_.begin()) return nullptr;
  Entry& entry = std::prev(next)->second;
  return address < entry.range.end() ? &entry : nullptr;
}

std::shared_ptr<const Event> WakeProgress::await(CUdeviceptr address, Device*& device,
                                                 Status& status) {
  std::unique_lock<std::mutex> lock(mutex_);
  Entry* entry = around(address);
  if (entry == nullptr) return nullptr;
  changed_.wait(lock, [&] { return entry->event || entry->arrived || finished_; });
  device = entry->device;
  if (!entry->event && !entry->arrived) status = status_;
  return entry->event;
}

// The driver is asked without the mutex: the wake and others go on meanwhile.
Status WakeProgress::hold(CUdeviceptr address, CUstream stream) {
  Device* device = nullptr;
  Status status;
  const std::shared_ptr<const Event> event = await(address, device, status);
  if (!event) return status;
  ContextGuard context(*device);
  return context.status().ok() ? event->hold(stream) : context.status();
}

Status WakeProgress::wait(CUdeviceptr address) {
  Device* device = nullptr;
  Status status;
  const std::shared_ptr<const Event> event = await(address, device, status);
  if (!event) return status;
  ContextGuard context(*device);
  return context.status().ok() ? event->wait() : context.status();
}

bool WakeProgress::reached(CUdeviceptr address) {
  std::shared_ptr<const Event> event;
  Device* device = nullptr;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    const Entry* entry = around(address);
    if (entry == nullptr || entry->arrived) return true;
    event = entry->event;
    device = entry->device;
  }
  if (!event) return false;
  ContextGuard context(*device);
  return context.status().ok() && event->reached();
}

}  // namespace cumem
