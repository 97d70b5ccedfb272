#include "core/status.h"

namespace cumem {
namespace {

// Errors after which every later call on the context fails as well. From the
// descriptions of CUresult in cuda.h ("the context cannot be used anymore").
bool ends_context(CUresult code) noexcept {
  switch (code) {
    case CUDA_ERROR_ILLEGAL_ADDRESS:
    case CUDA_ERROR_LAUNCH_FAILED:
    case CUDA_ERROR_LAUNCH_TIMEOUT:
    case CUDA_ERROR_ASSERT:
    case CUDA_ERROR_HARDWARE_STACK_ERROR:
    case CUDA_ERROR_ILLEGAL_INSTRUCTION:
    case CUDA_ERROR_MISALIGNED_ADDRESS:
    case CUDA_ERROR_INVALID_ADDRESS_SPACE:
    case CUDA_ERROR_INVALID_PC:
    case CUDA_ERROR_ECC_UNCORRECTABLE:
    case CUDA_ERROR_NVLINK_UNCORRECTABLE:
    case CUDA_ERROR_CONTEXT_IS_DESTROYED:
    case CUDA_ERROR_EXTERNAL_DEVICE:
    case CUDA_ERROR_MPS_CLIENT_TERMINATED:
      return true;
    default:
      return false;
  }
}

bool breaks_capture(CUresult code) noexcept {
  return code >= CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED &&
         code <= CUDA_ERROR_STREAM_CAPTURE_WRONG_THREAD;
}

Fault classify(CUresult code) noexcept {
  if (code == CUDA_SUCCESS) return Fault::none;
  if (code == CUDA_ERROR_OUT_OF_MEMORY) return Fault::device_memory;
  if (code == CUDA_ERROR_DEINITIALIZED) return Fault::deinitialized;
  if (code == CUDA_ERROR_NOT_SUPPORTED) return Fault::unsupported;
  if (ends_context(code)) return Fault::dead_context;
  if (breaks_capture(code)) return Fault::capture;
  return Fault::driver;
}

}  // namespace

Status check(CUresult code, const char* call, std::size_t bytes, int device) noexcept {
  Status status = failure(classify(code), call, bytes, device);
  status.code = code;
  return status;
}

const char* fault_name(Fault fault) noexcept {
  switch (fault) {
    case Fault::none:
      return "none";
    case Fault::device_memory:
      return "device_memory";
    case Fault::host_memory:
      return "host_memory";
    case Fault::capture:
      return "capture";
    case Fault::dead_context:
      return "dead_context";
    case Fault::deinitialized:
      return "deinitialized";
    case Fault::forked:
      return "forked";
    case Fault::unsupported:
      return "unsupported";
    case Fault::invalid:
      return "invalid";
    case Fault::integrity:
      return "integrity";
    case Fault::source:
      return "source";
    case Fault::disk:
      return "disk";
    case Fault::driver:
      return "driver";
  }
  return "driver";
}

}  // namespace cumem
