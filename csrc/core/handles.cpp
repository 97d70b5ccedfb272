#include "core/handles.h"

namespace cumem {
namespace {

// What a destructor does: try, and book it if the driver will not.
template <class Owner>
void let_go(const Driver* driver, Owner& owner) noexcept {
  if (driver == nullptr) return;
  if (Status status = owner.release(); !status.ok()) driver->refuse(status);
}

}  // namespace

Reservation& Reservation::operator=(Reservation&& other) noexcept {
  Reservation taken(std::move(other));
  swap(taken);
  return *this;
}

Reservation::~Reservation() { let_go(driver_, *this); }

void Reservation::swap(Reservation& other) noexcept {
  std::swap(driver_, other.driver_);
  std::swap(address_, other.address_);
  std::swap(bytes_, other.bytes_);
}

Status Reservation::create(const Driver& driver, std::size_t bytes,
                           std::size_t alignment) noexcept {
  CUdeviceptr address = 0;
  Status status = check(driver.cuMemAddressReserve(&address, bytes, alignment, 0, 0),
                        "cuMemAddressReserve", bytes);
  if (!status.ok()) return status;
  driver_ = &driver;
  address_ = address;
  bytes_ = bytes;
  driver.ledger().reservations += 1;
  driver.ledger().reserved_bytes += bytes;
  return {};
}

Status Reservation::release() noexcept {
  if (driver_ == nullptr) return {};
  Status status = check(driver_->cuMemAddressFree(address_, bytes_), "cuMemAddressFree", bytes_);
  if (!status.ok()) return status;
  driver_->ledger().reservations -= 1;
  driver_->ledger().reserved_bytes -= bytes_;
  driver_ = nullptr;
  return {};
}

Physical& Physical::operator=(Physical&& other) noexcept {
  Physical taken(std::move(other));
  swap(taken);
  return *this;
}

Physical::~Physical() {
  const Driver* driver = driver_;
  let_go(driver, *this);
  if (driver_ != nullptr) driver->ledger().refused_handles += 1;
}

void Physical::swap(Physical& other) noexcept {
  std::swap(driver_, other.driver_);
  std::swap(handle_, other.handle_);
  std::swap(bytes_, other.bytes_);
  std::swap(device_, other.device_);
}

Status Physical::create(const Driver& driver, std::size_t bytes, const CUmemAllocationProp& prop,
                        int device) noexcept {
  CUmemGenericAllocationHandle handle = 0;
  Status status = check(driver.cuMemCreate(&handle, bytes, &prop, 0), "cuMemCreate", bytes, device);
  if (!status.ok()) return status;
  driver_ = &driver;
  handle_ = handle;
  bytes_ = bytes;
  device_ = device;
  driver.ledger().handles_created += 1;
  driver.ledger().physical_bytes += bytes;
  return {};
}

Status Physical::release() noexcept {
  if (driver_ == nullptr) return {};
  Status status = check(driver_->cuMemRelease(handle_), "cuMemRelease", bytes_, device_);
  if (!status.ok()) return status;
  driver_->ledger().handles_released += 1;
  driver_->ledger().physical_bytes -= bytes_;
  driver_ = nullptr;
  return {};
}

Mapping& Mapping::operator=(Mapping&& other) noexcept {
  Mapping taken(std::move(other));
  swap(taken);
  return *this;
}

Mapping::~Mapping() { let_go(driver_, *this); }

void Mapping::swap(Mapping& other) noexcept {
  std::swap(driver_, other.driver_);
  std::swap(address_, other.address_);
  std::swap(bytes_, other.bytes_);
  std::swap(device_, other.device_);
}

Status Mapping::create(const Driver& driver, CUdeviceptr address, std::size_t bytes,
                       const Physical& physical, int device) noexcept {
  Status status =
      check(driver.cuMemMap(address, bytes, 0, physical.handle(), 0), "cuMemMap", bytes, device);
  if (!status.ok()) return status;
  driver_ = &driver;
  address_ = address;
  bytes_ = bytes;
  device_ = device;
  driver.ledger().mappings += 1;
  return {};
}

Status Mapping::release() noexcept {
  Mapping* self = this;
  return driver_ == nullptr ? Status{} : release_row(&self, 1);
}

Status Mapping::release_row(Mapping* const* first, std::size_t count) noexcept {
  const Driver& driver = *first[0]->driver_;
  std::size_t bytes = 0;
  for (std::size_t i = 0; i < count; ++i) bytes += first[i]->bytes_;
  Status status =
      check(driver.cuMemUnmap(first[0]->address_, bytes), "cuMemUnmap", bytes, first[0]->device_);
  if (!status.ok()) return status;
  driver.ledger().mappings -= count;
  for (std::size_t i = 0; i < count; ++i) first[i]->driver_ = nullptr;
  return {};
}

}  // namespace cumem
