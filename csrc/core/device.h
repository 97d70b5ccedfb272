// What does cumem know about one GPU, and how does it act on it without being
// noticed?
//
// A Device holds the primary context (the one torch uses), what memory on it
// may carry, and the streams to ask before a wait that could break a graph
// capture. Guards leave the caller's context and capture mode as they were.
#pragma once

#include <cuda.h>

#include <cstddef>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "core/driver.h"
#include "core/processors.h"
#include "core/status.h"

namespace cumem {

// What the device offers beyond plain VMM. Each is probed with a real
// allocation, because an attribute may promise what a container then forbids.
struct Features {
  bool virtual_memory = false;
  bool posix_handle = false;
  bool gpu_direct_rdma = false;
};

class Device {
 public:
  // Retains the primary context and probes features. On failure `out` is empty
  // and nothing is retained.
  static Status open(const Driver& driver, int ordinal, std::unique_ptr<Device>& out);
  ~Device();
  Device(const Device&) = delete;
  Device& operator=(const Device&) = delete;

  const Driver& driver() const noexcept { return driver_; }
  int ordinal() const noexcept { return ordinal_; }
  CUdevice handle() const noexcept { return handle_; }
  CUcontext context() const noexcept { return context_; }
  const Features& features() const noexcept { return features_; }
  // What the driver says of itself; more than features() where the attempt was refused.
  const Features& offered() const noexcept { return offered_; }
  std::size_t granularity() const noexcept { return granularity_; }
  const CUmemAllocationProp& prop() const noexcept { return prop_; }
  // Who may touch memory of this device: itself, then every peer that can.
  const std::vector<CUmemAccessDesc>& access() const noexcept { return access_; }

  // Processors on the device's NUMA node; null: any.
  const std::shared_ptr<const cpu_set_t>& processors() const noexcept { return processors_; }

  std::size_t round_up(std::size_t bytes) const noexcept {
    return (bytes + granularity_ - 1) / granularity_ * granularity_;
  }

  // Free and total bytes now; pre: none (the context is pushed for the call).
  Status memory(std::size_t& free_bytes, std::size_t& total_bytes) const noexcept;

  // Streams that live as long as the process (torch's own pool streams).
  void watch(std::vector<CUstream> streams);
  // Remembers `stream` if it is capturing right now.
  void note(CUstream stream);
  // Is a capture under way on a stream we know of, or on any blocking stream?
  // Harms no capture. A capture on a foreign non-blocking stream is not seen.
  bool capturing();

  // A stream of cumem's own for copies in one direction, made at first use; it
  // does not wait for the legacy stream. pre: the context is current.
  enum class Direction { to_host, to_device };
  Status copy_stream(Direction direction, CUstream* out);
  // Waits for what that stream was given, without burning a processor.
  Status wait_for_copies(Direction direction);

  // Waits for all work on all streams. pre: no capture is under way.
  Status synchronize() const noexcept;

 private:
  Device(const Driver& driver, int ordinal) : driver_(driver), ordinal_(ordinal) {}
  Status retain();
  Status read_features();
  Status read_granularity();
  void drop_features_that_fail();
  void find_peers();
  bool peers_accept() const;
  void find_processors();
  bool attribute(CUdevice_attribute name) const noexcept;
  void give_back(CUresult code, const char* call) const noexcept;
  bool is_capturing(CUstream stream) const noexcept;

  const Driver& driver_;
  const int ordinal_;
  CUdevice handle_ = 0;
  CUcontext context_ = nullptr;
  Features features_;
  Features offered_;
  std::size_t granularity_ = 0;
  CUmemAllocationProp prop_ = {};
  std::vector<CUmemAccessDesc> access_;

  std::shared_ptr<const cpu_set_t> processors_;

  std::mutex streams_mutex_;
  CUstream copies_[2] = {nullptr, nullptr};
  CUevent copied_[2] = {nullptr, nullptr};
  std::vector<CUstream> watched_;
  std::vector<CUstream> captured_;  // were capturing when they last came by
};

// Makes a device's context current, and the old one again at the end.
class ContextGuard {
 public:
  explicit ContextGuard(const Device& device) noexcept;
  ContextGuard(const Driver& driver, CUcontext context) noexcept;
  ~ContextGuard();
  ContextGuard(const ContextGuard&) = delete;
  ContextGuard& operator=(const ContextGuard&) = delete;
  const Status& status() const noexcept { return status_; }

 private:
  const Driver& driver_;
  Status status_;
};

// Lets this thread make calls that a capture elsewhere in the process would
// otherwise be invalidated by (allocation is one of them).
class RelaxedCapture {
 public:
  explicit RelaxedCapture(const Driver& driver) noexcept;
  ~RelaxedCapture();
  RelaxedCapture(const RelaxedCapture&) = delete;
  RelaxedCapture& operator=(const RelaxedCapture&) = delete;

 private:
  const Driver& driver_;
  CUstreamCaptureMode previous_ = CU_STREAM_CAPTURE_MODE_RELAXED;
  bool exchanged_ = false;
};

}  // namespace cumem
