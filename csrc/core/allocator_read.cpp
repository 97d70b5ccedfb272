// Note [Read]
//
// Memory that is awake gets the bytes of a file, where it is. Its segments are taken for
// the time: no sleep, switch or resize comes in between, and a free waits. Work that may
// still use the old contents is waited for first, and the copies last, so that whatever
// the caller submits afterwards, on any stream, sees the new ones.
//
// A failure in the middle cannot be taken back: the old contents were nobody's to keep.
// Segments stay awake and mapped; what the parts cover is undefined.
#include "core/allocator.h"
#include "core/arriving.h"
#include "core/transition.h"

namespace cumem {
namespace {

Status refused(const Range& range) {
  Status status = failure(Fault::invalid, "reading into memory that is not awake", range.bytes);
  status.address = range.address;
  return status;
}

std::vector<FilePart> parts_on(const Device& device, const std::vector<FilePart>& parts,
                               const std::vector<Segment*>& segments) {
  std::vector<FilePart> own;
  for (std::size_t i = 0; i < parts.size(); ++i)
    if (&segments[i]->device() == &device) own.push_back(parts[i]);
  return own;
}

}  // namespace

// The awake segment of each part, all of them taken.
Status Allocator::take_awake(const std::vector<FilePart>& parts, Transition& transition,
                             std::vector<Segment*>& out) {
  std::map<CUdeviceptr, Segment*> taken;
  for (const FilePart& part : parts) {
    CUdeviceptr start = 0;
    {
      std::lock_guard<std::mutex> lock(mutex_);
      if (const Segment* segment = around(part.range.address)) start = segment->address();
    }
    Segment*& segment = taken[start];
    if (segment == nullptr && start != 0) segment = transition.take(start);
    if (segment == nullptr || segment->state != SegmentState::awake ||
        !segment->contains(part.range))
      return refused(part.range);
    out.push_back(segment);
  }
  return {};
}

Status Allocator::read_into(const File& file, const std::vector<FilePart>& parts) {
  std::lock_guard<std::mutex> operation(operation_);
  RelaxedCapture relaxed(*driver_);
  drain();
  Transition transition(*this);
  std::vector<Segment*> segments;
  Status status = take_awake(parts, transition, segments);
  if (status.ok()) status = transition.refuse_captures();
  if (status.ok()) status = wait_for_devices(transition);
  if (status.ok()) {
    const std::vector<Device*> devices = transition.devices();
    Transfers transfers(Device::Direction::to_device, file_means());
    for (Device* device : devices) (void)transfers.on(*device);
    status = on_each(devices, [&](Device& device) {
      return transfers.on(device).read(file, parts_on(device, parts, segments));
    });
    if (Status waited = transfers.wait(); status.ok()) status = waited;
  }
  if (status.ok()) status = file.prove();
  add_free_bytes(device_if_open(status.device), status);
  if (!host_.config().retain) host_.release_idle();
  return status;
}

}  // namespace cumem
