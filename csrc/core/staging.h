// How do bytes move between a device and what its copies cannot reach at full speed: files,
// and host memory that is not pinned?
//
// Through a bounded ring of pinned host memory. Several threads each take the next
// step of the work, move it between the file or backup and a buffer of theirs, and give the
// copy between buffer and device to the device's copy stream: reading, copying and
// writing overlap. (One thread reads a file in memory at a few GB/s; the link takes
// what fifteen give.)
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <functional>
#include <string>
#include <vector>

#include "core/device.h"
#include "core/event.h"
#include "core/file.h"
#include "core/host_store.h"
#include "core/range.h"
#include "core/status.h"

namespace cumem {

struct FileConfig {
  unsigned threads = 0;  // 0: by the number of processors
  // Small enough that what a thread reads is still in the processor's caches when the device
  // fetches it: 8 GiB from a tmpfs came at 46 GB/s, with 16 and 512 MiB at 33 (measured).
  std::size_t buffer_bytes = std::size_t{4} << 20;
  std::size_t ring_bytes = std::size_t{128} << 20;
  std::string folder;  // for backups on disk; empty: there can be none
};

// What moving files takes beside a device. Outlives every Staging.
struct FileMeans {
  HostStore& host;
  FileConfig config;
  std::atomic<std::uint64_t>& moved_bytes;  // counts on, for who shows progress
  // Gives up host memory that only saves time; false: there is none. Any thread may ask.
  std::function<bool()> make_room;
};

class Staging {
 public:
  Staging(Device& device, const FileMeans& means) : device_(device), means_(means) {}
  ~Staging();  // waits for copies that use the ring
  Staging(const Staging&) = delete;
  Staging& operator=(const Staging&) = delete;

  // The calls below need the device's context to be current. A failure may leave copies
  // running, as one of a Transfer does.

  // Reads the parts to the device; the last copies may still run when it returns.
  Status read(const File& file, const std::vector<FilePart>& parts);
  // Writes the parts into the file; everything is there when it returns.
  Status write(const File& file, const std::vector<FilePart>& parts);

  // The same for parts of `host`, whose pieces are ready, through slots that must be pinned.
  // pre: pin_slots() for these parts said that there are some.
  Status read(const HostBlock& host, const std::vector<FilePart>& parts);
  Status write(const HostBlock& host, const std::vector<FilePart>& parts);
  // Sees to it that there are pinned slots; `ready` is false where there is no memory for
  // one or the driver pins none. A failure is one of copies before.
  Status pin_slots(const std::vector<FilePart>& parts, bool& ready);

 private:
  struct Slot {
    HostBlock block;
    Event copied;
    bool busy = false;  // a copy that uses it may run
  };
  class Work;  // the steps of one call, and how it ends
  // Moves bytes between `data` and a place of the file or block.
  using Move = std::function<Status(std::uint64_t offset, std::byte* data, std::size_t bytes)>;
  struct Want {
    std::size_t step, count;
  };
  Want want(const std::vector<FilePart>& parts) const;
  bool enough(const Want& want) const noexcept;
  Status prepare(const std::vector<FilePart>& parts);
  Status renew(const Want& want, HostUse use);
  Status let_go();
  Status take(std::size_t bytes, std::size_t count, HostUse use);
  Status take_slot(std::size_t bytes, HostUse use);
  template <class Loop>
  Status run(Work& work, const Loop& loop);
  Status read(const Move& fetch, const std::vector<FilePart>& parts);   // pre: there are slots
  Status write(const Move& store, const std::vector<FilePart>& parts);  // pre: the same
  Status read_step(const Move& fetch, const FilePart& step, Slot& slot, CUstream stream);
  Status fetch_step(const FilePart& step, Slot& slot, CUstream stream);
  Status write_step(const Move& store, const FilePart& step, Slot& slot);
  Status mark(Slot& slot, CUstream stream);
  Status wait(Slot& slot);

  Device& device_;
  const FileMeans means_;
  std::size_t step_bytes_ = 0;     // of a slot
  HostUse use_ = HostUse::backup;  // of the slots' memory
  bool refused_ = false;           // fewer slots were pinned than were wanted: no more tries
  std::deque<Slot> slots_;
};

}  // namespace cumem
