#include "core/saver.h"

#include <algorithm>
#include <utility>

namespace cumem {
namespace {

bool aligned(const std::vector<Range>& ranges) noexcept {
  return std::all_of(ranges.begin(), ranges.end(),
                     [](const Range& range) { return range.address % 16 == 0; });
}

std::size_t count_pieces(const std::vector<Range>& ranges) noexcept {
  std::size_t count = 0;
  for (const Range& range : ranges) count += (range.bytes + kDigestBytes - 1) / kDigestBytes;
  return count;
}

}  // namespace

Status Saver::save(Backup& backup, const std::vector<Range>& unchanged) {
  const bool usable = digests() && aligned(backup.ranges);
  const bool trusted = backup.filled && check_ == CleanCheck::declared;
  if (!usable && !trusted) {
    backup.digests.clear();
    return transfer_.copy(backup);
  }
  if (backup.digests.size() != count_pieces(backup.ranges))
    backup.filled = backup.filled && trusted;
  backup.digests.resize(usable ? count_pieces(backup.ranges) : 0);
  return for_each_piece(
      backup.ranges, [&](const Range& piece, std::size_t index, std::size_t offset) -> Status {
        if (trusted)
          return covers(unchanged, piece) ? Status{} : transfer_.copy(piece, backup, offset);
        filling_.push_back({&backup, index, piece, offset});
        return filling_.size() < Digester::kBatch ? Status{} : launch();
      });
}

// Starts the filled batch, then uses the time to settle the one before.
Status Saver::launch() {
  if (filling_.empty()) return settle();
  std::vector<DigestPiece> pieces;
  pieces.reserve(filling_.size());
  for (const Job& job : filling_) pieces.push_back({job.range.address, job.range.bytes});
  const std::size_t next = (slot_ + 1) % Digester::kSlots;
  if (Status status = digester_->start(next, pieces); !status.ok()) return status;
  Status status = settle();
  running_ = std::exchange(filling_, {});
  slot_ = next;
  return status;
}

Status Saver::settle() {
  if (running_.empty()) return {};
  const std::vector<Job> jobs = std::exchange(running_, {});
  const Digest* digests = nullptr;
  if (Status status = digester_->finish(slot_, digests); !status.ok()) return status;
  return copy_changed(jobs, digests);
}

// Neighbours that changed are copied at once.
Status Saver::copy_changed(const std::vector<Job>& jobs, const Digest* digests) {
  Range run;
  const Job* first = nullptr;
  auto flush = [&]() -> Status {
    const Job* start = std::exchange(first, nullptr);
    return start == nullptr ? Status{} : transfer_.copy(run, *start->backup, start->offset);
  };
  for (std::size_t i = 0; i < jobs.size(); ++i) {
    const Job& job = jobs[i];
    Digest& known = job.backup->digests[job.index];
    const bool changed = !job.backup->filled || known != digests[i];
    known = digests[i];
    const bool joins =
        first != nullptr && first->backup == job.backup && run.end() == job.range.address;
    if (!changed || !joins)
      if (Status status = flush(); !status.ok()) return status;
    if (!changed) continue;
    if (first == nullptr) {
      first = &job;
      run = {job.range.address, 0};
    }
    run.bytes += job.range.bytes;
  }
  return flush();
}

Status Saver::finish() {
  for (int batch = 0; batch < 2; ++batch)
    if (Status status = launch(); !status.ok()) return status;
  return {};
}

}  // namespace cumem
