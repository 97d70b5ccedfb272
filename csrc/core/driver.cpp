#include "core/driver.h"

#include <dlfcn.h>

namespace cumem {
namespace {

#define CUMEM_TEXT_OF(name) #name
#define CUMEM_TEXT(name) CUMEM_TEXT_OF(name)

template <class Function>
void look_up(void* library, const char* symbol, Function& slot) noexcept {
  slot = reinterpret_cast<Function>(dlsym(library, symbol));
}

}  // namespace

Status Driver::load(const std::string& path, std::unique_ptr<Driver>& out, std::string& detail) {
  out.reset();
  std::unique_ptr<Driver> driver(new Driver);
  driver->path_ = path;
  // Local, so that no other library's undefined cu* symbols can bind to it.
  driver->library_ = dlopen(path.c_str(), RTLD_NOW | RTLD_LOCAL);
  if (driver->library_ == nullptr) {
    const char* reason = dlerror();
    detail = reason == nullptr ? path : reason;
    return failure(Fault::unsupported, "dlopen");
  }
  if (Status status = driver->bind(detail); !status.ok()) return status;
  if (Status status = check(driver->cuInit(0), "cuInit"); !status.ok()) return status;
  Status status = check(driver->cuDriverGetVersion(&driver->version_), "cuDriverGetVersion");
  if (status.ok()) out = std::move(driver);
  return status;
}

Status Driver::bind(std::string& detail) {
  const char* missing = nullptr;
#define CUMEM_REQUIRED(name)                 \
  look_up(library_, CUMEM_TEXT(name), name); \
  if (name == nullptr && missing == nullptr) missing = CUMEM_TEXT(name);
#define CUMEM_OPTIONAL(name) look_up(library_, CUMEM_TEXT(name), name);
  CUMEM_DRIVER_CALLS(CUMEM_REQUIRED, CUMEM_OPTIONAL)
#undef CUMEM_REQUIRED
#undef CUMEM_OPTIONAL
  if (missing == nullptr) return {};
  detail = path_ + " has no " + missing;
  return failure(Fault::unsupported, "dlsym");
}

Driver::~Driver() {
  if (library_ != nullptr) dlclose(library_);
}

const char* Driver::error_name(CUresult code) const noexcept {
  const char* name = nullptr;
  if (cuGetErrorName == nullptr || cuGetErrorName(code, &name) != CUDA_SUCCESS || name == nullptr)
    return "CUDA_ERROR_UNKNOWN";
  return name;
}

void Driver::refuse(const Status& status) const noexcept {
  ledger_.refused += 1;
  ledger_.refused_bytes += status.bytes;
  ledger_.last_refusal = static_cast<int>(status.code);
}

}  // namespace cumem
