#include "core/device.h"

#include <algorithm>
#include <utility>

#include "core/handles.h"

namespace cumem {

Status Device::open(const Driver& driver, int ordinal, std::unique_ptr<Device>& out) {
  out.reset();
  std::unique_ptr<Device> device(new Device(driver, ordinal));
  if (Status status = device->retain(); !status.ok()) return status;
  if (Status status = device->read_features(); !status.ok()) return status;
  ContextGuard context(*device);
  if (!context.status().ok()) return context.status();
  RelaxedCapture relaxed(driver);
  if (Status status = device->read_granularity(); !status.ok()) return status;
  device->drop_features_that_fail();
  device->find_peers();
  device->find_processors();
  out = std::move(device);
  return {};
}

Device::~Device() {
  if (context_ == nullptr) return;
  {
    ContextGuard context(*this);
    for (int i = 0; i < 2; ++i) {
      if (copied_[i] != nullptr) give_back(driver_.cuEventDestroy(copied_[i]), "cuEventDestroy");
      if (copies_[i] != nullptr) give_back(driver_.cuStreamDestroy(copies_[i]), "cuStreamDestroy");
    }
  }
  give_back(driver_.cuDevicePrimaryCtxRelease(handle_), "cuDevicePrimaryCtxRelease");
}

void Device::give_back(CUresult code, const char* call) const noexcept {
  if (Status status = check(code, call, 0, ordinal_); !status.ok()) driver_.refuse(status);
}

Status Device::retain() {
  Status status = check(driver_.cuDeviceGet(&handle_, ordinal_), "cuDeviceGet", 0, ordinal_);
  if (!status.ok()) return status;
  return check(driver_.cuDevicePrimaryCtxRetain(&context_, handle_), "cuDevicePrimaryCtxRetain", 0,
               ordinal_);
}

// An attribute that the driver does not know is a feature that is absent.
bool Device::attribute(CUdevice_attribute name) const noexcept {
  int value = 0;
  return driver_.cuDeviceGetAttribute(&value, name, handle_) == CUDA_SUCCESS && value != 0;
}

Status Device::read_features() {
  features_.virtual_memory = attribute(CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED);
  features_.posix_handle =
      attribute(CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED);
  features_.gpu_direct_rdma =
      attribute(CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_WITH_CUDA_VMM_SUPPORTED);
  if (features_.virtual_memory) return {};
  return failure(Fault::unsupported, "virtual memory management", 0, ordinal_);
}

Status Device::read_granularity() {
  prop_.type = CU_MEM_ALLOCATION_TYPE_PINNED;
  prop_.location.type = CU_MEM_LOCATION_TYPE_DEVICE;
  prop_.location.id = handle_;
  return check(driver_.cuMemGetAllocationGranularity(&granularity_, &prop_,
                                                     CU_MEM_ALLOC_GRANULARITY_MINIMUM),
               "cuMemGetAllocationGranularity", 0, ordinal_);
}

// Asks for everything, then for less, until a real allocation works. A device
// that is full says nothing about features: they stay as offered.
void Device::drop_features_that_fail() {
  offered_ = features_;
  for (int attempt = 0; attempt < 3; ++attempt) {
    features_.gpu_direct_rdma = offered_.gpu_direct_rdma && attempt < 1;
    features_.posix_handle = offered_.posix_handle && attempt < 2;
    prop_.allocFlags.gpuDirectRDMACapable = features_.gpu_direct_rdma ? 1 : 0;
    prop_.requestedHandleTypes =
        features_.posix_handle ? CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR : CU_MEM_HANDLE_TYPE_NONE;
    Physical probe;
    Status status = probe.create(driver_, granularity_, prop_, ordinal_);
    if (status.ok() || status.fault == Fault::device_memory) return;
  }
}

void Device::find_peers() {
  CUmemAccessDesc self = {};
  self.location = prop_.location;
  self.flags = CU_MEM_ACCESS_FLAGS_PROT_READWRITE;
  access_.assign(1, self);
  int devices = 0;
  if (driver_.cuDeviceCanAccessPeer == nullptr) return;
  if (driver_.cuDeviceGetCount(&devices) != CUDA_SUCCESS) return;
  for (int ordinal = 0; ordinal < devices; ++ordinal) {
    CUdevice peer = 0;
    int reachable = 0;
    if (ordinal == ordinal_ || driver_.cuDeviceGet(&peer, ordinal) != CUDA_SUCCESS) continue;
    if (driver_.cuDeviceCanAccessPeer(&reachable, peer, handle_) != CUDA_SUCCESS) continue;
    if (reachable == 0) continue;
    CUmemAccessDesc access = self;
    access.location.id = peer;
    access_.push_back(access);
  }
  if (access_.size() > 1 && !peers_accept()) access_.resize(1);
}

// Tries the access list on one granule, so that a peer that is there but may
// not be used costs peer access and not every allocation.
bool Device::peers_accept() const {
  Reservation range;
  Physical memory;
  Mapping mapping;
  return range.create(driver_, granularity_, granularity_).ok() &&
         memory.create(driver_, granularity_, prop_, ordinal_).ok() &&
         mapping.create(driver_, range.address(), granularity_, memory, ordinal_).ok() &&
         driver_.cuMemSetAccess(range.address(), granularity_, access_.data(), access_.size()) ==
             CUDA_SUCCESS;
}

void Device::find_processors() {
  char bus[32] = {};
  if (driver_.cuDeviceGetPCIBusId == nullptr) return;
  if (driver_.cuDeviceGetPCIBusId(bus, sizeof(bus), handle_) != CUDA_SUCCESS) return;
  processors_ = processors_near(bus);
}

Status Device::memory(std::size_t& free_bytes, std::size_t& total_bytes) const noexcept {
  ContextGuard context(*this);
  if (!context.status().ok()) return context.status();
  return check(driver_.cuMemGetInfo(&free_bytes, &total_bytes), "cuMemGetInfo", 0, ordinal_);
}

void Device::watch(std::vector<CUstream> streams) {
  std::lock_guard<std::mutex> lock(streams_mutex_);
  watched_ = std::move(streams);
}

bool Device::is_capturing(CUstream stream) const noexcept {
  CUstreamCaptureStatus capture = CU_STREAM_CAPTURE_STATUS_NONE;
  CUresult code = driver_.cuStreamIsCapturing(stream, &capture);
  // The legacy stream answers so when a blocking stream of its context captures.
  if (code == CUDA_ERROR_STREAM_CAPTURE_IMPLICIT) return true;
  return code == CUDA_SUCCESS && capture != CU_STREAM_CAPTURE_STATUS_NONE;
}

// Only capturing streams are remembered, and only until their capture ends: a
// stream handle that its owner has destroyed must not be asked anything.
void Device::note(CUstream stream) {
  if (!is_capturing(stream)) return;
  std::lock_guard<std::mutex> lock(streams_mutex_);
  if (std::find(captured_.begin(), captured_.end(), stream) == captured_.end())
    captured_.push_back(stream);
}

bool Device::capturing() {
  ContextGuard context(*this);
  if (!context.status().ok()) return false;
  if (is_capturing(CU_STREAM_LEGACY)) return true;
  std::lock_guard<std::mutex> lock(streams_mutex_);
  auto ended = [this](CUstream stream) { return !is_capturing(stream); };
  captured_.erase(std::remove_if(captured_.begin(), captured_.end(), ended), captured_.end());
  if (!captured_.empty()) return true;
  return std::any_of(watched_.begin(), watched_.end(),
                     [this](CUstream stream) { return is_capturing(stream); });
}

Status Device::copy_stream(Direction direction, CUstream* out) {
  std::lock_guard<std::mutex> lock(streams_mutex_);
  const int i = static_cast<int>(direction);
  constexpr unsigned flags = CU_EVENT_BLOCKING_SYNC | CU_EVENT_DISABLE_TIMING;
  Status status;
  if (copied_[i] == nullptr)
    status = check(driver_.cuEventCreate(&copied_[i], flags), "cuEventCreate", 0, ordinal_);
  if (status.ok() && copies_[i] == nullptr)
    status = check(driver_.cuStreamCreate(&copies_[i], CU_STREAM_NON_BLOCKING), "cuStreamCreate", 0,
                   ordinal_);
  *out = copies_[i];
  return status;
}

Status Device::wait_for_copies(Direction direction) {
  const int i = static_cast<int>(direction);
  Status status =
      check(driver_.cuEventRecord(copied_[i], copies_[i]), "cuEventRecord", 0, ordinal_);
  if (!status.ok()) return status;
  return check(driver_.cuEventSynchronize(copied_[i]), "cuEventSynchronize", 0, ordinal_);
}

Status Device::synchronize() const noexcept {
  ContextGuard context(*this);
  if (!context.status().ok()) return context.status();
  return check(driver_.cuCtxSynchronize(), "cuCtxSynchronize", 0, ordinal_);
}

ContextGuard::ContextGuard(const Device& device) noexcept
    : driver_(device.driver()),
      status_(check(device.driver().cuCtxPushCurrent(device.context()), "cuCtxPushCurrent", 0,
                    device.ordinal())) {}

ContextGuard::ContextGuard(const Driver& driver, CUcontext context) noexcept
    : driver_(driver), status_(check(driver.cuCtxPushCurrent(context), "cuCtxPushCurrent")) {}

// The caller must get its own state back, so a refusal is answered by asking once
// more; only then is it booked.
template <class Call>
void insist(const Driver& driver, const Call& call) noexcept {
  if (call().ok()) return;
  if (Status status = call(); !status.ok()) driver.refuse(status);
}

ContextGuard::~ContextGuard() {
  if (!status_.ok()) return;
  insist(driver_, [this] {
    CUcontext popped = nullptr;
    return check(driver_.cuCtxPopCurrent(&popped), "cuCtxPopCurrent");
  });
}

RelaxedCapture::RelaxedCapture(const Driver& driver) noexcept : driver_(driver) {
  exchanged_ = driver_.cuThreadExchangeStreamCaptureMode(&previous_) == CUDA_SUCCESS;
}

RelaxedCapture::~RelaxedCapture() {
  if (!exchanged_) return;
  insist(driver_, [this] {
    return check(driver_.cuThreadExchangeStreamCaptureMode(&previous_),
                 "cuThreadExchangeStreamCaptureMode");
  });
}

}  // namespace cumem
