// What can the allocator be asked, and what does it answer?
#pragma once

#include <cuda.h>

#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "core/host_store.h"
#include "core/segment.h"
#include "core/staging.h"
#include "core/wake_progress.h"

namespace cumem {

struct Config {
  std::size_t chunk_bytes = std::size_t{1} << 30;  // the driver is paid by the piece
  std::size_t margin_bytes = 0;  // of device memory, that malloc and growth leave free
  HostConfig host;
  FileConfig file;
};

// Where a sleep puts the contents that come back.
enum class Store : std::uint8_t {
  host,    // in host memory
  disk,    // in a private file in FileConfig::folder
  source,  // left to the segment's source where they are unchanged, else in host memory
};

// One segment to put to sleep. `backup` holds the ranges whose contents come
// back, inside the segment, in address order, without overlap; empty means that
// all of its contents are discarded.
struct SegmentPlan {
  CUdeviceptr segment = 0;
  std::vector<Range> backup = {};
  std::vector<Range> unchanged = {};  // what the caller declares as not written since it woke
  Store store = Store::host;
};

// How a sleep finds out what its backups hold already.
enum class CleanCheck : std::uint8_t {
  digest,    // by digests of the contents, where the device can compute them
  never,     // not at all: everything is copied
  declared,  // as the plan's `unchanged` says
};

// Segments that are gone or asleep are passed over. After a failure before the
// first unmap everything is as before the call. After a refused unmap or
// release, segments are exactly awake or asleep, every byte is in place or in a
// backup, and the same call continues.
struct SleepRequest {
  std::vector<SegmentPlan> segments;
  CleanCheck clean_check = CleanCheck::digest;
  bool verify = false;  // read every backup again before anything is unmapped
};

struct WakeRequest {
  std::vector<CUdeviceptr> segments;
  // Written to every byte that no backup covers; nothing: left undefined.
  std::optional<unsigned char> fill;
  bool verify = false;  // read all that was restored before it counts as awake
  // Given: segments are published one by one, and others can wait for each. After a
  // failure the rest stays asleep with its backups. Null: all or nothing.
  std::shared_ptr<WakeProgress> progress;
};

// Puts some segments to sleep and wakes others, piece by piece, with device memory
// for little more than one of both. All host memory is taken before the first
// unmap. After a failure every segment is exactly awake or asleep, nothing is lost,
// and the same or the opposite call goes on.
struct SwitchRequest {
  SleepRequest sleep;
  WakeRequest wake;
};

// Segments with room to grow, and what each is to cover then, in whole chunks. Growth is
// all or nothing; a refused unmap leaves each segment exactly as large as it says.
struct ResizeRequest {
  std::vector<Range> segments;  // address of a segment, bytes wanted
};

using Phases = std::map<std::string, double>;  // seconds

struct SleepResult {
  std::size_t freed_bytes = 0;        // physical memory that went back to the driver
  std::size_t copied_bytes = 0;       // moved to the host
  std::size_t disk_bytes = 0;         // in backups on disk
  std::size_t reload_bytes = 0;       // left to files that hold them
  std::size_t pageable_bytes = 0;     // of the arena, not pinned
  bool digested = false;              // the devices computed digests
  std::vector<CUdeviceptr> segments;  // that went to sleep now
  Phases phases;
};

struct WakeResult {
  std::size_t mapped_bytes = 0;
  std::size_t restored_bytes = 0;
  std::vector<CUdeviceptr> segments;
  Phases phases;
};

struct SwitchResult {
  SleepResult sleep;
  WakeResult wake;
};

struct SegmentInfo {
  CUdeviceptr address = 0;
  std::size_t bytes = 0;
  std::size_t asked_bytes = 0;  // what malloc or resize was asked for: the rest is padding
  std::size_t mapped_bytes = 0;
  std::size_t mapped_chunks = 0;
  std::size_t handles = 0;  // chunks with physical memory, mapped or not
  std::size_t backup_bytes = 0;
  std::size_t pinned_file_bytes = 0;  // pages of its file
  int device = 0;
  SegmentState state = SegmentState::awake;
  Owner owner;
  std::uint64_t serial = 0;
};

// What free() and destructors could not say.
struct FreeCounters {
  std::uint64_t unknown = 0;      // an address that is not ours
  std::uint64_t deferred = 0;     // put off because of a capture (total)
  std::uint64_t waiting = 0;      // of those, still put off now
  std::uint64_t refused = 0;      // segments that the driver would not take back (total)
  std::uint64_t quarantined = 0;  // of those, kept aside now
  std::uint64_t quarantined_bytes = 0;
  std::uint64_t failed_mallocs = 0;
};

}  // namespace cumem
