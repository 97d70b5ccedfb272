// What does the allocator promise, and what must hold between its parts?
//
// A registry of segments under one mutex, and two operations on them: sleep and
// wake. Equations that hold whenever the mutex is free and no operation runs
// (check() proves them against the driver):
//
//   for each segment   awake: mapped = bytes;  asleep: mapped = 0
//                      (but for what a failed unmap left, which is exact)
//   in the ledger      created - released handles = mapped chunks + refused
//   for each backup    host bytes >= bytes of its ranges
//
// Note [Two mutexes]: `operation_` is held for a whole sleep or wake, seconds
// long, so that there is one at a time. `mutex_` guards the registry and the
// published fields of segments, is held for microseconds, and never during a
// driver call: torch calls malloc and free with its own lock held, and a thread
// that waits for a copy would stop every allocation of the process. What an
// operation works on is marked `in_transition`; a free that meets such a segment
// dooms it, and the operation ends it. Neither mutex is ever held while Python
// runs. Order: GIL (released), operation_, mutex_, then the host store's.
#pragma once

#include <cuda.h>

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include "core/device.h"
#include "core/digester.h"
#include "core/driver.h"
#include "core/host_store.h"
#include "core/requests.h"
#include "core/segment.h"
#include "core/status.h"

namespace cumem {

class Transfers;
class Transition;
struct Leaving;

class Allocator {
 public:
  explicit Allocator(std::shared_ptr<const Driver> driver, const Config& config);
  // pre: no segment is live, or the process is ending.
  ~Allocator();
  Allocator(const Allocator&) = delete;
  Allocator& operator=(const Allocator&) = delete;

  // A new awake segment of at least `bytes`; 0 and a Status when there is none.
  // Fresh memory has undefined contents.
  Status malloc(std::size_t bytes, int device, CUstream stream, Owner owner, CUdeviceptr& out);

  // A new sleeping segment with the contents of `source`, at least `bytes` long: a wake
  // reads them. 0 and a Status when there is none.
  Status reserve(std::size_t bytes, int device, Owner owner, std::unique_ptr<Source> source,
                 CUdeviceptr& out);

  // The same, with chunks of its own size or room to grow.
  Status malloc(const Extent& extent, int device, CUstream stream, Owner owner, CUdeviceptr& out);

  // Grows and shrinks awake segments where they are; a backup that is kept of one is
  // dropped. Waits for the devices before it gives memory back.
  Status resize(const ResizeRequest& request);

  // Ends a segment in whatever state, after work that may still use it. Cannot
  // fail: what goes wrong is counted (FreeCounters). During a capture it is put
  // off to the next call that finds none.
  void free(CUdeviceptr address) noexcept;

  // All or nothing; see requests.h for what is left behind after a failure.
  Status sleep(const SleepRequest& request, SleepResult& result);
  Status wake(const WakeRequest& request, WakeResult& result);
  Status exchange(const SwitchRequest& request, SwitchResult& result);

  // Does this allocator own `address` (the start of a segment, or inside one)?
  bool owns(CUdeviceptr address) const;
  // Is every byte of [address, address + bytes) in awake segments of ours?
  bool is_awake(CUdeviceptr address, std::size_t bytes) const;
  // The owner of the segment around `address`, or nothing.
  std::optional<Owner> owner_of(CUdeviceptr address) const;

  // Corrects who a segment belongs to, where the scope it was made in did not
  // tell (a capture that allocates from a graph pool). An address that no
  // segment starts at is passed over.
  void assign(CUdeviceptr segment, const Owner& owner);

  std::vector<SegmentInfo> segments() const;
  // Paths of the files that these awake segments sleep to and that are not any more what
  // was loaded, or cannot be read; each once. Reads the files' headers.
  std::set<std::string> changed_sources(const std::vector<CUdeviceptr>& segments) const;
  // Numbers of the pools that have sleeping segments.
  std::vector<std::uint64_t> sleeping_pools() const;
  FreeCounters counters() const;
  std::size_t live_segments() const;

  // Proves the equations above; on failure the Status names the first segment
  // that does not agree. Waits for an operation under way.
  Status verify();

  // Frees what was put off, where that is possible now.
  void drain();
  // The same, and gives back what the driver refused, where it consents now; what it
  // refuses again waits on. Each sleep, wake, switch and resize begins with it.
  void catch_up();
  bool capturing(int device);
  Status device(int ordinal, Device** out);

  // Gives a device the kernel that computes digests; until then, and where it
  // fails, sleeps copy everything. Loading it twice does nothing.
  Status load_digester(int ordinal, const void* image);
  bool has_digester(int ordinal) const;

  // Drops backups that are kept for segments that are awake, then gives back all
  // host memory that no backup needs; returns the bytes.
  std::size_t release_host();

  // Copies the backup of `range`, which lies in one block that sleeps, to `out`; the
  // memory stays asleep. Fault::invalid: it is awake, or has no backup in host memory. On
  // failure part of `out` may be written.
  Status read_backup(const Range& range, std::byte* out);

  // Fills awake memory of ours with a file's bytes, through the ring, and returns when
  // they are there for every stream. pre: no byte is in two parts.
  // Fault::invalid: a part is not wholly in one awake segment; Fault::capture; or no room
  // for the ring (Fault::host_memory): nothing was written on that device. Any other
  // failure, also a file that has changed: contents of all parts are undefined, and the
  // segments are awake and whole.
  Status read_into(const File& file, const std::vector<FilePart>& parts);

  // Bytes moved between files and devices so far, also by an operation under way.
  std::uint64_t file_bytes() const noexcept { return file_bytes_; }

  HostStore& host() noexcept { return host_; }
  const Driver& driver() const noexcept { return *driver_; }
  void configure(const Config& config);

 private:
  friend class Transition;
  using Registry = std::map<CUdeviceptr, std::unique_ptr<Segment>>;
  // What host memory that only saves time made room for when it went.
  struct Room {
    std::size_t released = 0;  // bytes that the system has back
    bool more = false;         // for backups, in the arena or beside it
  };

  Status make_segment(const Extent& extent, Device& device, std::unique_ptr<Segment>& out);
  Status keep_margin(std::size_t bytes, const Device& device) const;
  Status reserve_segment(Extent extent, Device& device, std::unique_ptr<Segment>& out);
  void publish(std::unique_ptr<Segment> segment);
  FileMeans file_means();
  Status leave_to_sources(std::vector<Leaving>& leaving, CleanCheck check, Transition& transition);
  Status prove_reloaded(const std::vector<Segment*>& segments);
  const Segment* around(CUdeviceptr address) const;       // pre: mutex_ is held
  std::unique_ptr<Segment> extract(CUdeviceptr address);  // pre: mutex_ is free
  void end(std::unique_ptr<Segment> segment) noexcept;    // pre: mutex_ is free
  Status give_back(Segment& segment) noexcept;            // pre: it is in no registry
  void quarantine(std::unique_ptr<Segment> segment);

  Status verify_ledger() const;  // pre: operation_ is held
  Status take_awake(const std::vector<FilePart>& parts, Transition& transition,
                    std::vector<Segment*>& out);
  // Drops backups that are kept for awake segments, then pieces that `release` chooses.
  // pre: the same.
  Room make_room(std::size_t (HostStore::*release)());
  bool drop_kept_backups();  // was there any? pre: the same
  Status sleep_alone(const SleepRequest& request, SleepResult& result);  // pre: the same
  Status take_host_memory(std::vector<Leaving>& leaving);
  Status save_all(const std::vector<Device*>& devices, std::vector<Leaving>& leaving,
                  CleanCheck check, Transfers& transfers);
  Status verify_saved(std::vector<Leaving>& leaving, const SleepRequest& request);
  Status verify_restored(const std::vector<Segment*>& waking, bool verify, WakeResult& result);
  Status wake_whole(const WakeRequest& request, const std::vector<Segment*>& waking,
                    Transition& transition, WakeResult& result);
  Device* device_if_open(int ordinal);
  bool all_digest(const std::vector<Device*>& devices);
  Status exchange_alone(const SwitchRequest& request, SwitchResult& result);  // pre: the same
  Status pin_if_required(const std::vector<Leaving>& leaving);
  Status exchange_all(const SwitchRequest& request, std::vector<Leaving>& leaving,
                      const std::vector<Segment*>& arriving, Transition& transition,
                      SwitchResult& result, std::vector<Segment*>& arrived);
  Digester* digester_of(const Device& device);  // valid while operation_ is held

  // Order matters: what comes later goes first, and needs what comes before it.
  const std::shared_ptr<const Driver> driver_;
  std::mutex devices_mutex_;
  std::map<int, std::unique_ptr<Device>> devices_;
  HostStore host_;
  std::atomic<std::uint64_t> file_bytes_{0};
  std::mutex operation_;
  mutable std::mutex mutex_;
  Config config_;
  std::map<int, std::unique_ptr<Digester>> digesters_;  // guarded by operation_ and mutex_
  Registry segments_;
  std::vector<std::unique_ptr<Segment>> quarantine_;  // the driver refused part of these
  std::vector<CUdeviceptr> deferred_;                 // freed during a capture
  std::uint64_t next_serial_ = 1;
  FreeCounters counters_;
  std::atomic<int> unpublished_{0};  // segments between the driver and the registry
};

}  // namespace cumem
