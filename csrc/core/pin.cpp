#include "core/pin.h"

namespace cumem {

Pin& Pin::operator=(Pin&& other) noexcept {
  std::swap(driver_, other.driver_);
  std::swap(context_, other.context_);
  std::swap(data_, other.data_);
  std::swap(bytes_, other.bytes_);
  return *this;
}

Pin::~Pin() {
  const Driver* driver = driver_;
  if (Status status = release(); !status.ok()) driver->refuse(status);
}

Status Pin::take(const Driver& driver, std::byte* data, std::size_t bytes,
                 unsigned flags) noexcept {
  flags |= CU_MEMHOSTREGISTER_PORTABLE | CU_MEMHOSTREGISTER_DEVICEMAP;
  Status status = check(driver.cuCtxGetCurrent(&context_), "cuCtxGetCurrent");
  if (status.ok())
    status = check(driver.cuMemHostRegister(data, bytes, flags), "cuMemHostRegister", bytes);
  // Out of memory from this call speaks of the host.
  if (status.fault == Fault::device_memory) status.fault = Fault::host_memory;
  if (!status.ok()) return status;
  driver_ = &driver;
  data_ = data;
  bytes_ = bytes;
  driver.ledger().registered_bytes += bytes;
  return {};
}

Status Pin::release() noexcept {
  if (driver_ == nullptr) return {};
  RelaxedCapture relaxed(*driver_);
  ContextGuard context(*driver_, context_);
  Status status = context.status();
  if (status.ok())
    status = check(driver_->cuMemHostUnregister(data_), "cuMemHostUnregister", bytes_);
  if (!status.ok()) return status;
  driver_->ledger().registered_bytes -= bytes_;
  driver_ = nullptr;
  return {};
}

}  // namespace cumem
