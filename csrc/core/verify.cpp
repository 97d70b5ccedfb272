#include "core/verify.h"

#include <algorithm>
#include <atomic>
#include <thread>

#include "core/range.h"
#include "core/threads.h"

namespace cumem {
namespace {

struct Piece {
  Range range;
  std::size_t offset;  // in the backup
};

std::vector<Piece> pieces_of(const std::vector<Range>& ranges) {
  std::vector<Piece> pieces;
  (void)for_each_piece(ranges, [&](const Range& range, std::size_t, std::size_t offset) {
    pieces.push_back({range, offset});
    return Status{};
  });
  return pieces;
}

bool fits_kernel(const std::vector<Range>& ranges) noexcept {
  return std::all_of(ranges.begin(), ranges.end(),
                     [](const Range& range) { return range.address % 16 == 0; });
}

Status digest_by_kernel(Digester& digester, const std::vector<Piece>& pieces,
                        std::vector<Digest>& digests) {
  for (std::size_t first = 0; first < pieces.size(); first += Digester::kBatch) {
    const std::size_t count = std::min(Digester::kBatch, pieces.size() - first);
    std::vector<DigestPiece> batch;
    for (std::size_t i = first; i < first + count; ++i)
      batch.push_back({pieces[i].range.address, pieces[i].range.bytes});
    const Digest* results = nullptr;
    if (Status status = digester.start(0, batch); !status.ok()) return status;
    if (Status status = digester.finish(0, results); !status.ok()) return status;
    digests.insert(digests.end(), results, results + count);
  }
  return {};
}

Status digest_by_reading(Device& device, const std::vector<Piece>& pieces,
                         std::vector<Digest>& digests) {
  std::vector<std::byte> buffer(kDigestBytes);
  CUstream stream = nullptr;
  Status status = device.copy_stream(Device::Direction::to_host, &stream);
  for (const Piece& piece : pieces) {
    if (status.ok())
      status = check(device.driver().cuMemcpyDtoHAsync(buffer.data(), piece.range.address,
                                                       piece.range.bytes, stream),
                     "cuMemcpyDtoHAsync", piece.range.bytes, device.ordinal());
    if (status.ok()) status = device.wait_for_copies(Device::Direction::to_host);
    if (!status.ok()) {
      // The copy may run, and the buffer goes.
      if (stream != nullptr) (void)device.wait_for_copies(Device::Direction::to_host);
      return status;
    }
    digests.push_back(digest_of(buffer.data(), piece.range.bytes));
  }
  return {};
}

// A piece may lie in several spans of the arena; a digest wants it in one.
Digest digest_of_piece(const HostBlock& host, const Piece& piece) {
  std::vector<std::byte> joined;
  const std::byte* whole = nullptr;
  (void)host.visit(piece.offset, piece.range.bytes, [&](std::byte* data, std::size_t bytes) {
    if (bytes == piece.range.bytes)
      whole = data;
    else
      joined.insert(joined.end(), data, data + bytes);
    return Status{};
  });
  return digest_of(whole != nullptr ? whole : joined.data(), piece.range.bytes);
}

Status digest_on_disk(const FileBlock& disk, const Piece& piece, Digest& digest) {
  std::vector<std::byte> data(piece.range.bytes);
  Status status = disk.file().read(disk.offset() + piece.offset, data.data(), data.size());
  if (status.ok()) digest = digest_of(data.data(), data.size());
  return status;
}

}  // namespace

Status digest_device(Device& device, Digester* digester, const std::vector<Range>& ranges,
                     std::vector<Digest>& digests) {
  const std::vector<Piece> pieces = pieces_of(ranges);
  digests.clear();
  if (digester != nullptr && fits_kernel(ranges))
    return digest_by_kernel(*digester, pieces, digests);
  return digest_by_reading(device, pieces, digests);
}

Status digest_backup(const Backup& backup, std::vector<Digest>& digests) {
  const std::vector<Piece> pieces = pieces_of(backup.ranges);
  digests.assign(pieces.size(), Digest{});
  std::vector<Status> statuses(pieces.size());
  std::atomic<std::size_t> next{0};
  auto work = [&](std::size_t) {
    for (std::size_t i = next++; i < pieces.size(); i = next++)
      if (backup.disk.bytes() > 0)
        statuses[i] = digest_on_disk(backup.disk, pieces[i], digests[i]);
      else
        digests[i] = digest_of_piece(backup.host, pieces[i]);
  };
  const std::size_t wanted = std::min<std::size_t>(std::thread::hardware_concurrency(), 16);
  on_threads(std::min(wanted, pieces.size()), work);
  for (const Status& status : statuses)
    if (!status.ok()) return status;
  return {};
}

Status compare(const Backup& backup, const std::vector<Digest>& digests, const char* what,
               int device) {
  const std::vector<Piece> pieces = pieces_of(backup.ranges);
  for (std::size_t i = 0; i < pieces.size(); ++i) {
    if (i < digests.size() && i < backup.digests.size() && digests[i] == backup.digests[i])
      continue;
    Status status = failure(Fault::integrity, what, pieces[i].range.bytes, device);
    status.address = pieces[i].range.address;
    return status;
  }
  return {};
}

}  // namespace cumem
