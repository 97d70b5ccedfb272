#include "core/allocator.h"

#include <algorithm>
#include <utility>

namespace cumem {
namespace {

// While one lives, the ledger and the registry may differ by a segment.
class Unpublished {
 public:
  explicit Unpublished(std::atomic<int>& count) noexcept : count_(count) { ++count_; }
  ~Unpublished() { --count_; }
  Unpublished(const Unpublished&) = delete;
  Unpublished& operator=(const Unpublished&) = delete;

 private:
  std::atomic<int>& count_;
};

}  // namespace

Allocator::Allocator(std::shared_ptr<const Driver> driver, const Config& config)
    : driver_(std::move(driver)), host_(*driver_, config.host), config_(config) {}

// Members go in reverse order: segments give their backups to the host store
// and their memory to the driver, so both are declared before them.
Allocator::~Allocator() {
  for (auto& [address, segment] : segments_) end(std::move(segment));
}

Status Allocator::device(int ordinal, Device** out) {
  std::lock_guard<std::mutex> lock(devices_mutex_);
  std::unique_ptr<Device>& slot = devices_[ordinal];
  if (!slot)
    if (Status status = Device::open(*driver_, ordinal, slot); !status.ok()) return status;
  *out = slot.get();
  return {};
}

void Allocator::configure(const Config& config) {
  host_.configure(config.host);
  std::lock_guard<std::mutex> lock(mutex_);
  config_ = config;
}

// What is free may change at once, so a margin is kept as well as can be, not exactly.
Status Allocator::keep_margin(std::size_t bytes, const Device& device) const {
  std::size_t margin = 0;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    margin = config_.margin_bytes;
  }
  if (margin == 0) return {};
  std::size_t free_bytes = 0;
  std::size_t total_bytes = 0;
  Status status = device.memory(free_bytes, total_bytes);
  if (!status.ok() || (free_bytes >= bytes && free_bytes - bytes >= margin)) return status;
  status = failure(Fault::device_memory, "the memory margin", bytes, device.ordinal());
  status.free_bytes = free_bytes;
  return status;
}

Status Allocator::reserve_segment(Extent extent, Device& device, std::unique_ptr<Segment>& out) {
  if (extent.chunk_bytes == 0) {
    std::lock_guard<std::mutex> lock(mutex_);
    extent.chunk_bytes = config_.chunk_bytes;
  }
  auto segment = std::make_unique<Segment>();
  Status status = segment->reserve(device, extent);
  if (!status.ok()) return status;
  segment->asked_bytes = extent.bytes;
  out = std::move(segment);
  return {};
}

Status Allocator::make_segment(const Extent& extent, Device& device,
                               std::unique_ptr<Segment>& out) {
  std::unique_ptr<Segment> segment;
  Status status = reserve_segment(extent, device, segment);
  if (!status.ok()) return status;
  if (status = segment->map(); !status.ok()) {
    // What map() could not undo is kept, and its addresses with it.
    if (!segment->give_back().ok()) quarantine(std::move(segment));
    return status;
  }
  out = std::move(segment);
  return {};
}

Status Allocator::malloc(std::size_t bytes, int ordinal, CUstream stream, Owner owner,
                         CUdeviceptr& out) {
  return malloc(Extent{bytes}, ordinal, stream, std::move(owner), out);
}

Status Allocator::malloc(const Extent& extent, int ordinal, CUstream stream, Owner owner,
                         CUdeviceptr& out) {
  out = 0;
  Device* device = nullptr;
  drain();
  Unpublished unpublished(unpublished_);
  Status status = this->device(ordinal, &device);
  std::unique_ptr<Segment> segment;
  if (status.ok()) {
    RelaxedCapture relaxed(*driver_);
    ContextGuard context(*device);
    status = context.status();
    device->note(stream);
    if (status.ok()) status = keep_margin(device->round_up(extent.bytes), *device);
    if (status.ok()) status = make_segment(extent, *device, segment);
  }
  if (!status.ok()) {
    std::lock_guard<std::mutex> lock(mutex_);
    counters_.failed_mallocs += 1;
    return status;
  }
  segment->owner = std::move(owner);
  out = segment->address();
  publish(std::move(segment));
  return {};
}

Status Allocator::reserve(std::size_t bytes, int ordinal, Owner owner,
                          std::unique_ptr<Source> source, CUdeviceptr& out) {
  out = 0;
  Device* device = nullptr;
  std::unique_ptr<Segment> segment;
  drain();
  if (Status status = this->device(ordinal, &device); !status.ok()) return status;
  RelaxedCapture relaxed(*driver_);
  ContextGuard context(*device);
  Status status = context.status();
  if (status.ok()) status = reserve_segment(Extent{bytes}, *device, segment);
  if (!status.ok()) return status;
  for (FilePart& part : source->parts) part.range.address += segment->address();
  segment->owner = std::move(owner);
  segment->state = SegmentState::asleep;
  segment->backup.reload = source->parts;
  segment->source = std::move(source);
  out = segment->address();
  publish(std::move(segment));
  return {};
}

FileMeans Allocator::file_means() {
  std::lock_guard<std::mutex> lock(mutex_);
  const auto room = [this] { return make_room(&HostStore::release_idle).more; };
  return {host_, config_.file, file_bytes_, room};
}

void Allocator::publish(std::unique_ptr<Segment> segment) {
  std::lock_guard<std::mutex> lock(mutex_);
  segment->serial = next_serial_++;
  const CUdeviceptr address = segment->address();
  segments_.emplace(address, std::move(segment));
}

void Allocator::free(CUdeviceptr address) noexcept {
  int ordinal = -1;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    auto found = segments_.find(address);
    if (found == segments_.end()) {
      counters_.unknown += 1;
      return;
    }
    ordinal = found->second->device().ordinal();
  }
  if (capturing(ordinal)) {
    std::lock_guard<std::mutex> lock(mutex_);
    deferred_.push_back(address);
    counters_.deferred += 1;
    return;
  }
  drain();
  Unpublished unpublished(unpublished_);
  if (auto segment = extract(address)) end(std::move(segment));
}

void Allocator::drain() {
  std::vector<CUdeviceptr> waiting;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    if (deferred_.empty()) return;
    waiting.swap(deferred_);
  }
  for (CUdeviceptr address : waiting) free(address);
}

// Takes a segment out of the registry; null when an operation works on it, or
// when it is gone.
std::unique_ptr<Segment> Allocator::extract(CUdeviceptr address) {
  std::lock_guard<std::mutex> lock(mutex_);
  auto found = segments_.find(address);
  if (found == segments_.end()) return nullptr;
  if (found->second->in_transition) {
    found->second->doomed = true;
    return nullptr;
  }
  std::unique_ptr<Segment> segment = std::move(found->second);
  segments_.erase(found);
  return segment;
}

// Kernels may still use the memory: cuMemUnmap does not wait, so this does.
Status Allocator::give_back(Segment& segment) noexcept {
  RelaxedCapture relaxed(*driver_);
  ContextGuard context(segment.device());
  Status status = context.status();
  if (status.ok() && segment.mapped_bytes() > 0) status = segment.device().synchronize();
  return status.ok() ? segment.give_back() : status;
}

void Allocator::end(std::unique_ptr<Segment> segment) noexcept {
  const Status status = give_back(*segment);
  const bool had_backup = segment->backup.host.bytes() > 0;
  segment->backup = Backup{};
  segment->source.reset();
  if (!status.ok()) quarantine(std::move(segment));
  if (had_backup && !host_.config().retain) host_.release_idle();
}

void Allocator::quarantine(std::unique_ptr<Segment> segment) {
  std::lock_guard<std::mutex> lock(mutex_);
  counters_.refused += 1;
  quarantine_.push_back(std::move(segment));
}

// A segment owns until the end what the driver has not taken, its addresses last: nothing
// else can be there, and what was taken before is not asked for twice.
void Allocator::catch_up() {
  drain();
  std::vector<std::unique_ptr<Segment>> waiting;
  Unpublished unpublished(unpublished_);
  {
    std::lock_guard<std::mutex> lock(mutex_);
    waiting.swap(quarantine_);
  }
  for (std::unique_ptr<Segment>& segment : waiting) {
    if (!segment->device().capturing() && give_back(*segment).ok()) continue;
    std::lock_guard<std::mutex> lock(mutex_);
    quarantine_.push_back(std::move(segment));
  }
}

Status Allocator::load_digester(int ordinal, const void* image) {
  std::lock_guard<std::mutex> operation(operation_);
  if (has_digester(ordinal)) return {};
  Device* device = nullptr;
  if (Status status = this->device(ordinal, &device); !status.ok()) return status;
  RelaxedCapture relaxed(*driver_);
  ContextGuard context(*device);
  std::unique_ptr<Digester> digester;
  Status status = context.status();
  if (status.ok()) status = Digester::open(*device, image, digester);
  if (!status.ok()) return status;
  std::lock_guard<std::mutex> lock(mutex_);
  digesters_[ordinal] = std::move(digester);
  return {};
}

bool Allocator::has_digester(int ordinal) const {
  std::lock_guard<std::mutex> lock(mutex_);
  return digesters_.count(ordinal) > 0;
}

bool Allocator::drop_kept_backups() {
  std::vector<Backup> kept;  // given back after the mutex is free
  std::lock_guard<std::mutex> lock(mutex_);
  for (auto& [address, segment] : segments_)
    if (segment->state == SegmentState::awake && segment->backup.host.bytes() > 0)
      kept.push_back(std::exchange(segment->backup, Backup{}));
  return !kept.empty();
}

Allocator::Room Allocator::make_room(std::size_t (HostStore::*release)()) {
  const bool dropped = drop_kept_backups();
  const std::size_t released = (host_.*release)();
  return {released, dropped || released > 0};
}

std::size_t Allocator::release_host() {
  std::lock_guard<std::mutex> operation(operation_);
  return make_room(&HostStore::release_idle).released;
}

bool Allocator::capturing(int ordinal) {
  Device* device = nullptr;
  return this->device(ordinal, &device).ok() && device->capturing();
}

}  // namespace cumem
