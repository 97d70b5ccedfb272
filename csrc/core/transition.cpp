#include "core/transition.h"

#include <algorithm>

namespace cumem {

namespace {

template <class Wait>
Status under_context(Device& device, const Wait& wait) {
  ContextGuard context(device);
  return context.status().ok() ? wait() : context.status();
}

}  // namespace

Transition::~Transition() {
  std::vector<std::unique_ptr<Segment>> doomed;
  {
    std::lock_guard<std::mutex> lock(allocator_.mutex_);
    for (Segment* segment : segments_) {
      segment->in_transition = false;
      if (!segment->doomed) continue;
      auto found = allocator_.segments_.find(segment->address());
      doomed.push_back(std::move(found->second));
      allocator_.segments_.erase(found);
    }
  }
  for (auto& segment : doomed) allocator_.end(std::move(segment));
}

Segment* Transition::take(CUdeviceptr address) {
  std::lock_guard<std::mutex> lock(allocator_.mutex_);
  auto found = allocator_.segments_.find(address);
  if (found == allocator_.segments_.end() || found->second->in_transition) return nullptr;
  segments_.push_back(found->second.get());
  found->second->in_transition = true;
  return found->second.get();
}

std::vector<Device*> Transition::devices() const {
  std::vector<Device*> devices;
  for (const Segment* segment : segments_) {
    Device* device = &segment->device();
    if (std::find(devices.begin(), devices.end(), device) == devices.end())
      devices.push_back(device);
  }
  return devices;
}

Status Transition::refuse_captures() const {
  for (Device* device : devices())
    if (device->capturing()) return failure(Fault::capture, "graph capture", 0, device->ordinal());
  return {};
}

Status wait_for_devices(const Transition& transition) {
  for (const Device* device : transition.devices())
    if (Status status = device->synchronize(); !status.ok()) return status;
  return {};
}

Transfer& Transfers::on(Device& device) {
  auto& slot = transfers_[&device];
  if (!slot) slot = std::make_unique<Transfer>(device, direction_, means_);
  return *slot;
}

// A wait that was refused is asked for once more: memory may go after it.
Status Transfers::wait() {
  Status first;
  for (auto& [device, transfer] : transfers_) {
    const Status status = under_context(*device, [&one = *transfer] { return one.wait(); });
    if (!status.ok()) (void)under_context(*device, [&one = *transfer] { return one.stop(); });
    if (first.ok()) first = status;
  }
  return first;
}

Transfers::~Transfers() {
  for (auto& [device, transfer] : transfers_) {
    const auto stop = [&one = *transfer] { return one.stop(); };
    if (!under_context(*device, stop).ok()) (void)under_context(*device, stop);
  }
}

std::size_t Transfers::copied_bytes() const noexcept {
  std::size_t bytes = 0;
  for (const auto& [device, transfer] : transfers_) bytes += transfer->copied_bytes();
  return bytes;
}

}  // namespace cumem
