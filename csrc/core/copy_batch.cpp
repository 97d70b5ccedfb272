#include "core/copy_batch.h"

#include "core/driver.h"

namespace cumem {
namespace {

// What is gathered before the driver gets it: long enough on the link to hide a call.
constexpr std::size_t kMostBytes = std::size_t{32} << 20;
// From how many copies on one call for all is used.
constexpr std::size_t kFewest = 8;

std::byte* host_pointer(CUdeviceptr address) noexcept {
  return reinterpret_cast<std::byte*>(static_cast<std::uintptr_t>(address));
}

}  // namespace

Status CopyBatch::add(CUdeviceptr at, std::byte* host, std::size_t bytes, CUstream stream) {
  on_device_.push_back(at);
  on_host_.push_back(static_cast<CUdeviceptr>(reinterpret_cast<std::uintptr_t>(host)));
  sizes_.push_back(bytes);
  bytes_ += bytes;
  return bytes_ < kMostBytes ? lost_ : submit(stream);
}

Status CopyBatch::copy(CUdeviceptr at, std::byte* host, std::size_t bytes, CUstream stream) {
  if (lost_.ok()) lost_ = submit_one(at, host, bytes, stream);
  return lost_;
}

void CopyBatch::forget() noexcept {
  on_device_.clear();
  on_host_.clear();
  sizes_.clear();
  bytes_ = 0;
}

void CopyBatch::clear() noexcept {
  forget();
  lost_ = {};
}

Status CopyBatch::submit(CUstream stream) {
  if (lost_.ok() && !sizes_.empty())
    lost_ = worth_one_call() ? submit_together(stream) : submit_each(stream);
  forget();
  return lost_;
}

Status CopyBatch::submit_one(CUdeviceptr at, std::byte* host, std::size_t bytes,
                             CUstream stream) const {
  const Driver& driver = device_.driver();
  return direction_ == Device::Direction::to_host
             ? check(driver.cuMemcpyDtoHAsync(host, at, bytes, stream), "cuMemcpyDtoHAsync", bytes,
                     device_.ordinal())
             : check(driver.cuMemcpyHtoDAsync(at, host, bytes, stream), "cuMemcpyHtoDAsync", bytes,
                     device_.ordinal());
}

Status CopyBatch::submit_each(CUstream stream) const {
  Status status;
  for (std::size_t i = 0; i < sizes_.size() && status.ok(); ++i)
    status = submit_one(on_device_[i], host_pointer(on_host_[i]), sizes_[i], stream);
  return status;
}

#if CUMEM_HAS_BATCHES

bool CopyBatch::worth_one_call() const noexcept {
  return sizes_.size() >= kFewest && device_.driver().cuMemcpyBatchAsync != nullptr;
}

Status CopyBatch::submit_together(CUstream stream) {
  CUmemcpyAttributes attributes = {};
  attributes.srcAccessOrder = CU_MEMCPY_SRC_ACCESS_ORDER_STREAM;
  std::size_t first = 0;  // copy that has these attributes, and so have all after it
  const bool out = direction_ == Device::Direction::to_host;
  CUdeviceptr* targets = (out ? on_host_ : on_device_).data();
  CUdeviceptr* sources = (out ? on_device_ : on_host_).data();
  const auto call = device_.driver().cuMemcpyBatchAsync;
#if CUDA_VERSION >= 13000
  const CUresult code =
      call(targets, sources, sizes_.data(), sizes_.size(), &attributes, &first, 1, stream);
#else
  std::size_t refused = 0;
  const CUresult code = call(targets, sources, sizes_.data(), sizes_.size(), &attributes, &first, 1,
                             &refused, stream);
#endif
  if (code == CUDA_ERROR_NOT_SUPPORTED) return submit_each(stream);
  return check(code, "cuMemcpyBatchAsync", bytes_, device_.ordinal());
}

#else  // cuda.h is older than the call

bool CopyBatch::worth_one_call() const noexcept { return false; }

Status CopyBatch::submit_together(CUstream stream) { return submit_each(stream); }

#endif

}  // namespace cumem
