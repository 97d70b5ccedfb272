#include "core/wake_progress.h"

#include <iterator>
#include <utility>

namespace cumem {

void WakeProgress::expect(const Range& segment) {
  std::lock_guard<std::mutex> lock(mutex_);
  entries_[segment.address].range = segment;
}

void WakeProgress::submitted(const Segment& segment, Event event) {
  std::lock_guard<std::mutex> lock(mutex_);
  Entry& entry = entries_[segment.address()];
  entry.range = {segment.address(), segment.bytes()};
  entry.device = &segment.device();
  entry.event = std::move(event);
  entry.submitted = true;
  changed_.notify_all();
}

void WakeProgress::finish(const Status& status) {
  std::lock_guard<std::mutex> lock(mutex_);
  finished_ = true;
  status_ = status;
  changed_.notify_all();
}

WakeProgress::Entry* WakeProgress::around(CUdeviceptr address) {
  auto next = entries_.upper_bound(address);
  if (next == entries_.begin()) return nullptr;
  Entry& entry = std::prev(next)->second;
  return address < entry.range.end() ? &entry : nullptr;
}

WakeProgress::Entry* WakeProgress::await(CUdeviceptr address, std::unique_lock<std::mutex>& lock,
                                         Status& status) {
  Entry* entry = around(address);
  if (entry == nullptr) return nullptr;
  changed_.wait(lock, [&] { return entry->submitted || finished_; });
  if (entry->submitted) return entry;
  status = status_;
  return nullptr;
}

Status WakeProgress::hold(CUdeviceptr address, CUstream stream) {
  std::unique_lock<std::mutex> lock(mutex_);
  Status status;
  Entry* entry = await(address, lock, status);
  if (entry == nullptr) return status;
  ContextGuard context(*entry->device);
  return context.status().ok() ? entry->event.hold(stream) : context.status();
}

Status WakeProgress::wait(CUdeviceptr address) {
  std::unique_lock<std::mutex> lock(mutex_);
  Status status;
  Entry* entry = await(address, lock, status);
  if (entry == nullptr) return status;
  // Entries stay where they are until the wake's owner drops them, so the wait for
  // the device need not keep others from asking.
  lock.unlock();
  ContextGuard context(*entry->device);
  return context.status().ok() ? entry->event.wait() : context.status();
}

bool WakeProgress::reached(CUdeviceptr address) {
  std::lock_guard<std::mutex> lock(mutex_);
  Entry* entry = around(address);
  if (entry == nullptr) return true;
  if (!entry->submitted) return false;
  ContextGuard context(*entry->device);
  return context.status().ok() && entry->event.reached();
}

}  // namespace cumem
