// How does a failure travel inside cumem?
//
// As a value. Nothing in core throws, exits or keeps a process-wide error: a
// call that failed once leaves nothing behind that could colour the next call.
//
// | where it is noticed          | how it is told                                  |
// |------------------------------|-------------------------------------------------|
// | core, any call               | Status returned                                 |
// | plugin malloc                | null pointer (torch raises its out-of-memory)   |
// | plugin free, a destructor    | counted in the driver's Ledger, warned once     |
// | binding                      | Status becomes an exception of cumem.errors     |
#pragma once

#include <cuda.h>

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>

namespace cumem {

enum class Fault : std::uint8_t {
  none,
  device_memory,  // the device is out of memory
  host_memory,    // the host, or our limit on it, is out of memory
  capture,        // a graph capture is under way; nothing was done
  dead_context,   // an earlier fault has ended this context: the process must restart
  deinitialized,  // the driver is shutting down with the process
  forked,         // called in a child of the process that set cumem up
  unsupported,    // this driver or device cannot do it
  invalid,        // the request does not fit the state (a caller's mistake)
  integrity,      // bytes or books do not agree
  source,         // the file that contents come from cannot be read, or has changed
  disk,           // the folder for backups, or a file in it, refused
  driver,         // any other error of the driver
};

struct Status {
  Fault fault = Fault::none;
  CUresult code = CUDA_SUCCESS;
  const char* call = "";       // static text: the driver call, or what was attempted
  std::size_t bytes = 0;       // how much was asked for, where that means something
  int device = -1;             // ordinal, or -1
  std::size_t free_bytes = 0;  // free on that device (or host), when fault is a memory fault
  std::uintptr_t address = 0;  // the segment concerned, or 0
  int error = 0;               // errno, where the system refused
  std::shared_ptr<const std::string> path;  // the file concerned, where there is one

  bool ok() const noexcept { return fault == Fault::none; }
};

// A Status for what cumem itself found wrong; `call` must be static text.
inline Status failure(Fault fault, const char* call, std::size_t bytes = 0,
                      int device = -1) noexcept {
  Status status;
  status.fault = fault;
  status.call = call;
  status.bytes = bytes;
  status.device = device;
  return status;
}

// Translates a driver result. `call` must be static text.
Status check(CUresult code, const char* call, std::size_t bytes = 0, int device = -1) noexcept;

// The stable name of a fault, as Python sees it.
const char* fault_name(Fault fault) noexcept;

}  // namespace cumem
