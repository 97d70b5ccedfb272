// Note [Wake is all or nothing]
//
// Everything asked for is created, mapped and restored before any of it is
// published, and no backup is dropped before that. While one segment's bytes are
// on their way the next one is created and mapped, so that the driver's calls hide
// behind the copies. A failure waits for the copies and gives back what this call
// mapped; the segments are asleep with their backups, as before, and the call can
// be repeated.
#include <algorithm>
#include <functional>
#include <utility>

#include "core/allocator.h"
#include "core/arriving.h"
#include "core/transition.h"

namespace cumem {
namespace {

// Large ones first: mapping a small one takes longer than filling it, and is hidden while
// copies of large ones run.
void sort_by_size(std::vector<Segment*>& segments) {
  std::stable_sort(segments.begin(), segments.end(), [](const Segment* one, const Segment* other) {
    return one->bytes() > other->bytes();
  });
}

Status wake_all(const std::vector<Segment*>& waking, const std::vector<Device*>& devices,
                const WakeRequest& request, const FileMeans& means, WakeResult& result) {
  Transfers transfers(Device::Direction::to_device, means);
  Stopwatch watch(result.phases);
  for (Device* device : devices) transfers.on(*device);
  Status status = on_each(devices, [&](Device& device) {
    for (Segment* segment : waking) {
      if (&segment->device() != &device) continue;
      Status one = map_and_restore(*segment, request.fill, transfers.on(device));
      if (!one.ok()) return one;
    }
    return Status{};
  });
  watch.lap("map_and_submit");
  if (status.ok()) status = transfers.wait();
  watch.lap("copy");
  result.restored_bytes = transfers.copied_bytes();
  return status;
}

// pre: the segment's context is current. On failure nothing of it is mapped.
Status bring_one(Segment& segment, const WakeRequest& request, Transfer& transfer,
                 Digester* digester) {
  Event event;
  Status status = map_and_restore(segment, request.fill, transfer);
  if (status.ok()) status = wait_and_prove(segment, transfer, digester);
  if (status.ok()) status = transfer.mark(event);
  if (status.ok()) {
    request.progress->submitted(segment, std::move(event));
    return {};
  }
  (void)transfer.stop();  // copies into it may run
  (void)segment.unmap();
  return status;
}

// What a piecewise wake takes of its allocator.
struct Means {
  bool retain;
  FileMeans file;
  std::function<Digester*(const Device&)> digester_of;
};

// What was submitted and is not awake yet, in order.
class Arrivals {
 public:
  Arrivals(const WakeRequest& request, bool retain, Transition& transition, WakeResult& result,
           std::vector<Backup>& spent)
      : request_(request),
        retain_(retain),
        transition_(transition),
        result_(result),
        spent_(spent) {}

  void add(Segment& segment) { waiting_.push_back(&segment); }

  // Publishes the first ones, as far as their bytes are there.
  void publish_reached() {
    publish(std::find_if(waiting_.begin(), waiting_.end(), [this](const Segment* segment) {
      return !request_.progress->reached(segment->address());
    }));
  }
  // The same for all, waiting for each; stops where the driver does not answer.
  void publish_one_by_one() {
    while (!waiting_.empty() && request_.progress->wait(waiting_.front()->address()).ok())
      publish(waiting_.begin() + 1);
  }
  // pre: no copy is running.
  void settle(bool filled) {
    publish_reached();
    if (filled) publish(waiting_.end());
    unmap_all(waiting_);
  }

 private:
  void publish(std::vector<Segment*>::iterator end) {
    if (end == waiting_.begin()) return;
    publish_awake({waiting_.begin(), end}, retain_, transition_, result_, spent_);
    std::for_each(waiting_.begin(), end,
                  [this](const Segment* segment) { request_.progress->arrived(*segment); });
    waiting_.erase(waiting_.begin(), end);
  }

  const WakeRequest& request_;
  const bool retain_;
  Transition& transition_;
  WakeResult& result_;
  std::vector<Backup>& spent_;
  std::vector<Segment*> waiting_;
};

// One after the other, devices too: what is needed first is asked for first. When the
// driver refuses a wait, what is there nevertheless stays awake: others may use it.
Status wake_piecewise(const std::vector<Segment*>& waking, const WakeRequest& request,
                      const Means& means, Transition& transition, WakeResult& result,
                      std::vector<Backup>& spent) {
  Transfers transfers(Device::Direction::to_device, means.file);
  Stopwatch watch(result.phases);
  Arrivals arrivals(request, means.retain, transition, result, spent);
  Status status;
  for (auto next = waking.begin(); next != waking.end() && status.ok(); ++next) {
    Segment& segment = **next;
    ContextGuard context(segment.device());
    status = context.status();
    if (status.ok())
      status = bring_one(segment, request, transfers.on(segment.device()),
                         means.digester_of(segment.device()));
    if (status.ok()) arrivals.add(segment);
    arrivals.publish_reached();
  }
  watch.lap("map_and_submit");
  arrivals.publish_one_by_one();
  const Status filled = transfers.wait();
  watch.lap("copy");
  result.restored_bytes = transfers.copied_bytes();
  arrivals.settle(filled.ok());
  return status.ok() ? filled : status;
}

}  // namespace

Status Allocator::wake_whole(const WakeRequest& request, const std::vector<Segment*>& waking,
                             Transition& transition, WakeResult& result) {
  Status status = wake_all(waking, transition.devices(), request, file_means(), result);
  if (status.ok()) status = prove_reloaded(waking);
  if (status.ok()) status = verify_restored(waking, request.verify, result);
  if (status.ok()) return {};
  unmap_all(waking);
  result = {};
  return status;
}

Status Allocator::prove_reloaded(const std::vector<Segment*>& segments) {
  for (Segment* segment : segments) {
    if (segment->backup.reload.empty()) continue;
    Device& device = segment->device();
    ContextGuard context(device);
    Status status = context.status();
    if (status.ok())
      status =
          cumem::prove_reloaded(*segment->source, segment->backup, device, digester_of(device));
    if (!status.ok()) return status;
  }
  return {};
}

Status Allocator::wake(const WakeRequest& request, WakeResult& result) {
  std::lock_guard<std::mutex> operation(operation_);
  RelaxedCapture relaxed(*driver_);
  catch_up();
  const bool retain = host_.config().retain;
  std::vector<Backup> spent;  // dropped last, when everything is awake
  Transition transition(*this);

  std::vector<Segment*> waking = select_arriving(request, transition);
  Status status = transition.refuse_captures();
  if (request.progress) {
    if (status.ok()) {
      const Means means{retain, file_means(),
                        [this](const Device& device) { return digester_of(device); }};
      status = wake_piecewise(waking, request, means, transition, result, spent);
    }
    request.progress->finish(status);
  } else if (status.ok()) {
    sort_by_size(waking);
    status = wake_whole(request, waking, transition, result);
    if (status.ok()) publish_awake(waking, retain, transition, result, spent);
  }
  add_free_bytes(device_if_open(status.device), status);
  spent.clear();
  if (!retain) host_.release_idle();
  return status;
}

Device* Allocator::device_if_open(int ordinal) {
  std::lock_guard<std::mutex> lock(devices_mutex_);
  auto found = devices_.find(ordinal);
  return found == devices_.end() ? nullptr : found->second.get();
}

}  // namespace cumem
