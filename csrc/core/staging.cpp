#include "core/staging.h"

#include <algorithm>
#include <cstring>
#include <mutex>
#include <thread>
#include <utility>

#include "core/threads.h"

namespace cumem {
namespace {

constexpr unsigned kMostThreads = 16;  // more read no faster

std::vector<FilePart> steps_of(const std::vector<FilePart>& parts, std::size_t most) {
  std::vector<FilePart> steps;
  for (const FilePart& part : parts)
    for (std::size_t done = 0; done < part.range.bytes; done += most)
      steps.push_back({{part.range.address + done, std::min(most, part.range.bytes - done)},
                       part.offset + done});
  return steps;
}

}  // namespace

class Staging::Work {
 public:
  explicit Work(std::vector<FilePart> steps) : steps_(std::move(steps)) {}
  // The next step, or null when there is none or one has failed.
  const FilePart* next() noexcept {
    const std::size_t at = next_++;
    return failed_ || at >= steps_.size() ? nullptr : &steps_[at];
  }
  void fail(const Status& status) {
    std::lock_guard<std::mutex> lock(mutex_);
    if (!failed_.exchange(true)) status_ = status;
  }
  std::size_t count() const noexcept { return steps_.size(); }
  // pre: no thread works any more.
  const Status& status() const noexcept { return status_; }

 private:
  const std::vector<FilePart> steps_;
  std::atomic<std::size_t> next_{0};
  std::atomic<bool> failed_{false};
  std::mutex mutex_;
  Status status_;
};

// The memory goes now, so a refusal is answered by asking once more.
Staging::~Staging() {
  ContextGuard context(device_);
  for (Slot& slot : slots_)
    if (!wait(slot).ok()) (void)wait(slot);
}

Status Staging::wait(Slot& slot) {
  if (!slot.busy) return {};
  Status status = slot.copied.wait();
  slot.busy = !status.ok();
  return status;
}

// Where the driver refuses, the copy is waited for without the event.
Status Staging::mark(Slot& slot, CUstream stream) {
  Status status = slot.copied.record(device_, stream);
  if (status.ok()) return status;
  (void)device_.driver().cuStreamSynchronize(stream);
  slot.busy = false;
  return status;
}

// Runs loop(slots of this thread) on several threads, this one among them.
template <class Loop>
Status Staging::run(Work& work, const Loop& loop) {
  const unsigned processors = std::max(2U, std::thread::hardware_concurrency()) - 1;
  const std::size_t wanted =
      means_.config.threads > 0 ? means_.config.threads : std::min(processors, kMostThreads);
  const std::size_t count =
      std::max<std::size_t>(1, std::min({wanted, work.count(), slots_.size()}));
  auto run_one = [&](std::size_t index) {
    RelaxedCapture relaxed(device_.driver());
    ContextGuard context(device_);
    std::vector<Slot*> own;
    for (std::size_t i = index; i < slots_.size(); i += count) own.push_back(&slots_[i]);
    Status status = context.status();
    if (status.ok()) status = loop(own);
    if (!status.ok()) work.fail(status);
  };
  on_threads(count, run_one);
  return work.status();
}

Status Staging::read_step(const Move& fetch, const FilePart& step, Slot& slot, CUstream stream) {
  if (Status status = wait(slot); !status.ok()) return status;
  const Driver& driver = device_.driver();
  CUdeviceptr at = step.range.address;
  std::uint64_t offset = step.offset;
  Status status =
      slot.block.visit(0, step.range.bytes, [&](std::byte* data, std::size_t bytes) -> Status {
        if (Status read = fetch(offset, data, bytes); !read.ok()) return read;
        slot.busy = true;
        Status copied = check(driver.cuMemcpyHtoDAsync(at, data, bytes, stream),
                              "cuMemcpyHtoDAsync", bytes, device_.ordinal());
        at += bytes;
        offset += bytes;
        return copied;
      });
  Status marked = slot.busy ? mark(slot, stream) : Status{};
  return status.ok() ? marked : status;
}

Status Staging::read(const File& file, const std::vector<FilePart>& parts) {
  if (total_bytes(parts) == 0) return {};
  if (Status status = prepare(parts); !status.ok()) return status;
  const Move fetch = [&](std::uint64_t offset, std::byte* data, std::size_t bytes) {
    Status status = file.read(offset, data, bytes);
    if (status.ok()) means_.moved_bytes += bytes;
    return status;
  };
  return read(fetch, parts);
}

Status Staging::read(const HostBlock& host, const std::vector<FilePart>& parts) {
  const Move fetch = [&](std::uint64_t offset, std::byte* data, std::size_t bytes) {
    return host.visit(offset, bytes, [&data](const std::byte* from, std::size_t step) {
      std::memcpy(std::exchange(data, data + step), from, step);
      return Status{};
    });
  };
  return read(fetch, parts);
}

Status Staging::read(const Move& fetch, const std::vector<FilePart>& parts) {
  CUstream stream = nullptr;
  Status status = device_.copy_stream(Device::Direction::to_device, &stream);
  if (!status.ok()) return status;
  Work work(steps_of(parts, step_bytes_));
  return run(work, [&](const std::vector<Slot*>& slots) -> Status {
    std::size_t turn = 0;
    while (const FilePart* step = work.next()) {
      Status one = read_step(fetch, *step, *slots[turn++ % slots.size()], stream);
      if (!one.ok()) return one;
    }
    return {};
  });
}

Status Staging::fetch_step(const FilePart& step, Slot& slot, CUstream stream) {
  const Driver& driver = device_.driver();
  CUdeviceptr at = step.range.address;
  Status status =
      slot.block.visit(0, step.range.bytes, [&](std::byte* data, std::size_t bytes) -> Status {
        slot.busy = true;
        Status copied = check(driver.cuMemcpyDtoHAsync(data, at, bytes, stream),
                              "cuMemcpyDtoHAsync", bytes, device_.ordinal());
        at += bytes;
        return copied;
      });
  Status marked = mark(slot, stream);
  return status.ok() ? marked : status;
}

Status Staging::write_step(const Move& store, const FilePart& step, Slot& slot) {
  if (Status status = wait(slot); !status.ok()) return status;
  std::uint64_t offset = step.offset;
  return slot.block.visit(0, step.range.bytes, [&](std::byte* data, std::size_t bytes) {
    return store(std::exchange(offset, offset + bytes), data, bytes);
  });
}

Status Staging::write(const File& file, const std::vector<FilePart>& parts) {
  if (total_bytes(parts) == 0) return {};
  if (Status status = prepare(parts); !status.ok()) return status;
  const Move store = [&](std::uint64_t offset, const std::byte* data, std::size_t bytes) {
    Status status = file.write(offset, data, bytes);
    if (status.ok()) means_.moved_bytes += bytes;
    return status;
  };
  return write(store, parts);
}

Status Staging::write(const HostBlock& host, const std::vector<FilePart>& parts) {
  const Move store = [&](std::uint64_t offset, const std::byte* data, std::size_t bytes) {
    return host.visit(offset, bytes, [&data](std::byte* to, std::size_t step) {
      std::memcpy(to, std::exchange(data, data + step), step);
      return Status{};
    });
  };
  return write(store, parts);
}

// While one step is stored the next one is on its way.
Status Staging::write(const Move& store, const std::vector<FilePart>& parts) {
  CUstream stream = nullptr;
  Status status = device_.copy_stream(Device::Direction::to_host, &stream);
  if (!status.ok()) return status;
  Work work(steps_of(parts, step_bytes_));
  return run(work, [&](const std::vector<Slot*>& slots) -> Status {
    std::size_t turn = 0;
    std::deque<std::pair<const FilePart*, Slot*>> fetched;
    Status one;
    auto write_first = [&] {
      one = write_step(store, *fetched.front().first, *fetched.front().second);
      fetched.pop_front();
    };
    while (const FilePart* step = work.next()) {
      if (fetched.size() == slots.size()) write_first();
      if (!one.ok()) return one;
      Slot& slot = *slots[turn++ % slots.size()];
      if (one = fetch_step(*step, slot, stream); !one.ok()) return one;
      fetched.emplace_back(step, &slot);
    }
    while (one.ok() && !fetched.empty()) write_first();
    return one;
  });
}

}  // namespace cumem
