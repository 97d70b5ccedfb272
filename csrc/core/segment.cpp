#include "core/segment.h"

#include <algorithm>
#include <map>

namespace cumem {

Status Segment::reserve(Device& device, const Extent& extent) {
  device_ = &device;
  step_ = std::max(device.round_up(extent.chunk_bytes), device.granularity());
  add_chunks(device.round_up(extent.bytes));
  show();
  const std::size_t capacity = device.round_up(std::max(extent.capacity, extent.bytes));
  return reservation_.create(device.driver(), capacity, device.granularity());
}

void Segment::add_chunks(std::size_t bytes) {
  for (std::size_t offset = chunk_end(); offset < bytes; offset = chunk_end()) {
    Chunk chunk;
    chunk.offset = offset;
    chunk.bytes = std::min(step_, bytes - offset);
    chunks_.push_back(std::move(chunk));
  }
}

Status Segment::grow(std::size_t bytes) {
  const std::size_t before = chunks_.size();
  add_chunks(bytes);
  Status status = map();
  if (status.ok()) return {};
  for (; chunks_.size() > before; chunks_.pop_back())
    if (!chunks_.back().mapping.empty()) mapped_bytes_ -= chunks_.back().bytes;
  return status;
}

Status Segment::shrink(std::size_t bytes) {
  while (!chunks_.empty() && chunks_.back().offset >= bytes) {
    Chunk& last = chunks_.back();
    if (!last.mapping.empty()) {
      if (Status status = last.mapping.release(); !status.ok()) return status;
      mapped_bytes_ -= last.bytes;
    }
    chunks_.pop_back();  // what the driver will not take back is booked as refused
  }
  return {};
}

std::size_t Segment::covering(std::size_t bytes) const noexcept {
  const std::size_t end = chunk_end();
  if (bytes > end) {  // the last chunk ends with the capacity
    const std::size_t more = (bytes - end + step_ - 1) / step_ * step_;
    return std::min(end + more, capacity());
  }
  const auto last = std::find_if(chunks_.begin(), chunks_.end(), [bytes](const Chunk& chunk) {
    return chunk.offset + chunk.bytes >= bytes;
  });
  return last == chunks_.end() ? end : last->offset + last->bytes;
}

Status Segment::map_chunk(Chunk& chunk, PhysicalPool* pool) {
  const Driver& driver = device_->driver();
  const int ordinal = device_->ordinal();
  // A physical that the driver refused to take back at sleep is used again.
  if (chunk.physical.empty() && pool != nullptr) chunk.physical = pool->take(chunk.bytes);
  if (chunk.physical.empty()) {
    Status status = chunk.physical.create(driver, chunk.bytes, device_->prop(), ordinal);
    if (!status.ok()) return status;
  }
  return chunk.mapping.create(driver, address() + chunk.offset, chunk.bytes, chunk.physical,
                              ordinal);
}

std::size_t Segment::bytes_to_create(const PhysicalPool& pool) const {
  std::map<std::size_t, std::size_t> wanted;
  for (const Chunk& chunk : chunks_)
    if (chunk.physical.empty()) ++wanted[chunk.bytes];
  std::size_t bytes = 0;
  for (const auto& [size, count] : wanted)
    bytes += size * (count - std::min(count, pool.count(size)));
  return bytes;
}

Status Segment::map(PhysicalPool* pool) {
  std::vector<std::size_t> mapped;
  mapped.reserve(chunks_.size());
  Status status;
  for (std::size_t i = 0; i < chunks_.size() && status.ok(); ++i) {
    if (!chunks_[i].mapping.empty()) continue;
    mapped.push_back(i);
    status = map_chunk(chunks_[i], pool);
  }
  if (status.ok()) status = open_access();
  if (!status.ok()) {
    undo(mapped);
    return status;
  }
  for (std::size_t i : mapped) mapped_bytes_ += chunks_[i].bytes;
  return {};
}

// One call over the whole range: the driver's cost is per call, and a chunk that
// was left mapped by an earlier failure may not have been opened.
Status Segment::open_access() {
  const std::vector<CUmemAccessDesc>& access = device_->access();
  const std::size_t bytes = chunk_end();
  return check(device_->driver().cuMemSetAccess(address(), bytes, access.data(), access.size()),
               "cuMemSetAccess", bytes, device_->ordinal());
}

// Gives back what map() took. A chunk that the driver will not take back stays
// owned and counted as mapped; the next unmap() tries it again.
void Segment::undo(const std::vector<std::size_t>& mapped) {
  for (std::size_t i : mapped) {
    Chunk& chunk = chunks_[i];
    if (chunk.mapping.release().ok()) chunk.physical.release();
    if (!chunk.mapping.empty()) mapped_bytes_ += chunk.bytes;
  }
}

// Unmaps chunks [first, last), which are mapped: the driver's cost is per call.
Status Segment::unmap_row(std::size_t first, std::size_t last) {
  std::vector<Mapping*> row;
  std::size_t bytes = 0;
  for (std::size_t i = first; i < last; ++i) {
    row.push_back(&chunks_[i].mapping);
    bytes += chunks_[i].bytes;
  }
  Status status = Mapping::release_row(row.data(), row.size());
  if (status.ok()) mapped_bytes_ -= bytes;
  return status;
}

Status Segment::let_go(Chunk& chunk, PhysicalPool* pool) {
  if (pool == nullptr) return chunk.physical.release();
  if (!chunk.physical.empty()) pool->put(std::move(chunk.physical), chunk.bytes);
  return {};
}

Status Segment::unmap(PhysicalPool* pool) {
  for (std::size_t first = 0; first < chunks_.size();) {
    std::size_t last = first;
    while (last < chunks_.size() && !chunks_[last].mapping.empty()) ++last;
    if (last > first)
      if (Status status = unmap_row(first, last); !status.ok()) return status;
    last = std::max(last, first + 1);  // one without a mapping may still have memory
    for (; first < last; ++first)
      if (Status status = let_go(chunks_[first], pool); !status.ok()) return status;
  }
  return {};
}

Status Segment::give_back() {
  if (Status status = unmap(); !status.ok()) return status;
  return reservation_.release();
}

std::size_t Segment::mapped_chunks() const noexcept {
  return static_cast<std::size_t>(std::count_if(
      chunks_.begin(), chunks_.end(), [](const Chunk& chunk) { return !chunk.mapping.empty(); }));
}

std::size_t Segment::handles() const noexcept {
  return static_cast<std::size_t>(std::count_if(
      chunks_.begin(), chunks_.end(), [](const Chunk& chunk) { return !chunk.physical.empty(); }));
}

bool Segment::contains(const Range& range) const noexcept {
  return contains(range.address) && range.bytes <= bytes() - (range.address - address());
}

Status Segment::verify() const {
  const Driver& driver = device_->driver();
  for (const Chunk& chunk : chunks_) {
    unsigned long long access = 0;
    CUmemGenericAllocationHandle handle = 0;
    const CUdeviceptr at = address() + chunk.offset;
    Status asked = check(driver.cuMemRetainAllocationHandle(&handle, reinterpret_cast<void*>(at)),
                         "cuMemRetainAllocationHandle", chunk.bytes, device_->ordinal());
    if (asked.fault == Fault::dead_context || asked.fault == Fault::deinitialized) return asked;
    const bool mapped = asked.ok();
    if (mapped) {
      Status status = check(driver.cuMemRelease(handle), "cuMemRelease", chunk.bytes);
      if (!status.ok()) driver.refuse(status);
    }
    const bool agreed =
        mapped == !chunk.mapping.empty() && (!mapped || handle == chunk.physical.handle());
    const CUmemLocation& self = device_->prop().location;
    const bool open = !mapped || (driver.cuMemGetAccess(&access, &self, at) == CUDA_SUCCESS &&
                                  access == CU_MEM_ACCESS_FLAGS_PROT_READWRITE);
    if (agreed && open) continue;
    Status status = failure(Fault::integrity, agreed ? "cuMemGetAccess" : "mapping of a chunk",
                            chunk.bytes, device_->ordinal());
    status.address = at;
    return status;
  }
  return {};
}

}  // namespace cumem
