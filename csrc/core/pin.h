// Who unpins host memory?
#pragma once

#include <cuda.h>

#include <cstddef>
#include <utility>

#include "core/device.h"
#include "core/driver.h"
#include "core/status.h"

namespace cumem {

// Owns the pinning of a run of host pages: cuMemHostRegister .. cuMemHostUnregister.
class Pin {
 public:
  Pin() = default;
  Pin(Pin&& other) noexcept { *this = std::move(other); }
  Pin& operator=(Pin&& other) noexcept;
  ~Pin();

  // Pins for every device. `flags` beside those. pre: nothing is held; a context is current.
  Status take(const Driver& driver, std::byte* data, std::size_t bytes,
              unsigned flags = 0) noexcept;
  // Nothing where nothing is held. On failure the pages must stay: the driver may still use
  // them.
  Status release() noexcept;
  bool held() const noexcept { return driver_ != nullptr; }

 private:
  const Driver* driver_ = nullptr;
  CUcontext context_ = nullptr;  // current when it was taken; made so to release
  std::byte* data_ = nullptr;
  std::size_t bytes_ = 0;
};

}  // namespace cumem
