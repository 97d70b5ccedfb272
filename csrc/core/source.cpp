#include "core/source.h"

#include <algorithm>
#include <utility>

#include "core/segment.h"
#include "core/verify.h"

namespace cumem {
namespace {

std::vector<Range> ranges_of(const std::vector<FilePart>& parts) {
  std::vector<Range> ranges;
  for (const FilePart& part : parts) ranges.push_back(part.range);
  return ranges;
}

// The pieces of the digests, with their places in the file.
std::vector<FilePart> pieces_of(const std::vector<FilePart>& parts) {
  std::vector<FilePart> pieces;
  for (const FilePart& part : parts)
    (void)for_each_piece({part.range}, [&](const Range& piece, std::size_t, std::size_t offset) {
      pieces.push_back({piece, part.offset + offset});
      return Status{};
    });
  return pieces;
}

// Adds a range at the end, or to the last one where it goes on.
void append(std::vector<Range>& ranges, const Range& next) {
  if (!ranges.empty() && ranges.back().end() == next.address)
    ranges.back().bytes += next.bytes;
  else
    ranges.push_back(next);
}

void append(std::vector<FilePart>& parts, const FilePart& next) {
  if (!parts.empty() && parts.back().range.end() == next.range.address &&
      parts.back().offset + parts.back().range.bytes == next.offset)
    parts.back().range.bytes += next.range.bytes;
  else
    parts.push_back(next);
}

std::vector<bool> unchanged_pieces(const Source& source, const std::vector<FilePart>& pieces,
                                   const std::vector<Digest>& now,
                                   const std::vector<Range>& declared) {
  std::vector<bool> unchanged(pieces.size());
  for (std::size_t i = 0; i < pieces.size(); ++i)
    unchanged[i] = now.empty() ? !source.stale[i] && covers(declared, pieces[i].range)
                               : now[i] == source.digests[i];
  return unchanged;
}

}  // namespace

std::vector<Range> Source::ranges() const { return ranges_of(parts); }

Status leave_to_source(Source& source, Backup& backup, const Reloadable& reloadable, Device& device,
                       Digester* digester) {
  const std::vector<FilePart> pieces = pieces_of(source.parts);
  source.stale.resize(pieces.size());
  std::vector<Digest> now;
  const bool digests = reloadable.by_digest && digester != nullptr && !source.digests.empty();
  if (digests)
    if (Status status = digest_device(device, digester, source.ranges(), now); !status.ok())
      return status;
  const std::vector<bool> unchanged = unchanged_pieces(source, pieces, now, reloadable.declared);
  std::vector<Range> saved;
  std::vector<FilePart> left;
  for (std::size_t i = 0; i < pieces.size(); ++i) {
    source.stale[i] = !unchanged[i];
    if (unchanged[i])
      append(left, pieces[i]);
    else
      append(saved, pieces[i].range);
  }
  if (!left.empty())
    if (Status status = source.file->prove(); !status.ok()) return status;
  backup.ranges = std::move(saved);
  backup.reload = std::move(left);
  return {};
}

Status prove_reloaded(Source& source, const Backup& backup, Device& device, Digester* digester) {
  if (backup.reload.empty()) return {};
  if (Status status = source.file->prove(); !status.ok()) return status;
  if (digester == nullptr || !source.keep) return {};
  std::vector<Digest> now;
  const std::vector<Range> restored = ranges_of(backup.reload);
  const bool all = total_bytes(restored) == total_bytes(source.parts);
  if (source.digests.empty() && !all) return {};
  if (Status status = digest_device(device, digester, source.ranges(), now); !status.ok())
    return status;
  if (source.digests.empty()) {
    source.digests = std::move(now);
    return {};
  }
  const std::vector<FilePart> pieces = pieces_of(source.parts);
  for (std::size_t i = 0; i < pieces.size(); ++i)
    if (covers(restored, pieces[i].range) && now[i] != source.digests[i]) {
      Status status = failure(Fault::source, "a file that has changed", pieces[i].range.bytes);
      status.path = source.file->shared_path();
      return status;
    }
  return {};
}

}  // namespace cumem
