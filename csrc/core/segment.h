// What is one segment, and which states can it be in?
//
// A segment is one reserved range of addresses, shown by chunks of physical
// memory. The addresses live as long as the segment; the chunks come and go.
// Addresses may be reserved for more than the segment has: bytes() is what its
// chunks cover, and everything that is said of it concerns that alone.
//
//   awake   every chunk is mapped, contents are the user's
//   asleep  the range is kept; contents are in `backup` or were discarded.
//           After a failed unmap some chunks may still be mapped: `mapped_bytes`
//           is exact, the backup is whole, and unmap() can be called again.
#pragma once

#include <cuda.h>

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "core/device.h"
#include "core/file.h"
#include "core/handles.h"
#include "core/host_store.h"
#include "core/physical_pool.h"
#include "core/range.h"
#include "core/source.h"
#include "core/status.h"
#include "digest/digest.h"

namespace cumem {

// The bytes of one segment's live blocks: ranges in address order, their
// contents one after the other in `host` or in `disk`. It may be kept while the segment
// is awake, so that the next sleep copies only what has changed. `reload` is what comes
// from the segment's source instead.
struct Backup {
  std::vector<Range> ranges;
  HostBlock host;
  FileBlock disk;
  std::vector<FilePart> reload;
  bool filled = false;          // host holds the contents of some moment
  std::vector<Digest> digests;  // of that moment, one a piece; empty: not known
};

// Who asked for a segment; decides what sleep does with it.
struct Owner {
  std::string tag;
  std::string policy;
  std::uint64_t pool = 0;  // the pool's number, 0 when it has none
  bool graph = false;      // private memory of a captured graph: every byte counts as live
};

// How much a segment has at first, in which pieces it comes, and how far it may grow.
struct Extent {
  std::size_t bytes = 0;
  std::size_t chunk_bytes = 0;  // most of one chunk; 0: as configured
  std::size_t capacity = 0;     // addresses to reserve; less than `bytes`: just as many
};

enum class SegmentState : std::uint8_t { awake, asleep };

class Segment {
 public:
  // Reserves the addresses and maps nothing. pre: chunk_bytes is not 0.
  // On failure `*this` must be destroyed; nothing is left reserved.
  Status reserve(Device& device, const Extent& extent);

  // Adds chunks until they cover `bytes`, and maps them; bytes() is as before until
  // show(). pre: awake, and `bytes` is within the capacity. On failure the segment is
  // as before; what the driver would not take back is booked as refused.
  Status grow(std::size_t bytes);

  // Unmaps and gives up the chunks that lie past the first `bytes`.
  // pre: awake, and no work uses them. On failure those so far are gone, the others
  // are as before, and the call can be repeated.
  Status shrink(std::size_t bytes);

  // What bytes() would be if the segment had to cover `bytes` with whole chunks.
  std::size_t covering(std::size_t bytes) const noexcept;
  // Makes bytes() say `bytes`, or what all chunks cover.
  void show(std::size_t bytes) noexcept { bytes_ = bytes; }
  void show() noexcept { bytes_ = chunk_end(); }

  // Creates, maps and opens every chunk that is not mapped, with memory from `pool`
  // where there is one and it fits. On failure every chunk that this call mapped is
  // given back to the driver, and the segment is as before.
  Status map(PhysicalPool* pool = nullptr);

  // Unmaps every mapped chunk, neighbours in one call, and releases its memory, or puts
  // it into `pool`. On failure what was unmapped so far is exactly known, the other
  // chunks are as before, and the call can be repeated.
  Status unmap(PhysicalPool* pool = nullptr);

  // How much map() would have to create beside what `pool` has.
  std::size_t bytes_to_create(const PhysicalPool& pool) const;

  // Ends the segment: unmap, release, free the addresses. On failure the
  // segment must be kept (quarantined): the driver still holds part of it.
  Status give_back();

  CUdeviceptr address() const noexcept { return reservation_.address(); }
  std::size_t bytes() const noexcept { return bytes_; }
  std::size_t capacity() const noexcept { return reservation_.bytes(); }
  std::size_t mapped_bytes() const noexcept { return mapped_bytes_; }
  std::size_t mapped_chunks() const noexcept;
  std::size_t handles() const noexcept;  // physical memory held, mapped or not
  Device& device() const noexcept { return *device_; }
  bool contains(CUdeviceptr address) const noexcept {
    return address >= reservation_.address() && address - reservation_.address() < bytes();
  }
  bool contains(const Range& range) const noexcept;

  // Asks the driver, chunk by chunk, whether it agrees with our books.
  Status verify() const;

  // The fields below belong to the allocator and are guarded by its mutex.
  Owner owner;
  SegmentState state = SegmentState::awake;
  Backup backup;
  std::unique_ptr<Source> source;  // null: its contents are in no file
  std::size_t asked_bytes = 0;     // of bytes(), what malloc was asked for
  std::uint64_t serial = 0;        // order of allocation
  bool in_transition = false;      // a sleep or wake is working on it, without the mutex
  bool doomed = false;             // freed meanwhile: goes when the transition ends

 private:
  struct Chunk {
    std::size_t offset = 0;
    std::size_t bytes = 0;
    Physical physical;
    Mapping mapping;
  };
  Status map_chunk(Chunk& chunk, PhysicalPool* pool);
  Status unmap_row(std::size_t first, std::size_t last);
  Status let_go(Chunk& chunk, PhysicalPool* pool);
  Status open_access();
  void add_chunks(std::size_t bytes);
  std::size_t chunk_end() const noexcept {
    return chunks_.empty() ? 0 : chunks_.back().offset + chunks_.back().bytes;
  }
  void undo(const std::vector<std::size_t>& mapped);

  Device* device_ = nullptr;
  Reservation reservation_;  // declared before the chunks: freed after them
  std::vector<Chunk> chunks_;
  std::size_t step_ = 0;   // most bytes of one chunk
  std::size_t bytes_ = 0;  // what others see; guarded by the allocator's mutex
  std::size_t mapped_bytes_ = 0;
};

}  // namespace cumem
