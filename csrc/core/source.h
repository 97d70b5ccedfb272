// How does a segment come back from the file that it was loaded from?
//
// Note [Source]
//
// The file is held open from the load on, with the digests of what was read. A sleep
// asks the device for the digests of what is there now: pieces that are as they were
// read need no backup, and all others go to one. Before anything is unmapped the file
// must prove that it has not changed, and at wake again, before it is read and after;
// what was read must have the digests of the load.
//
// Where the device cannot compute digests, only pieces that are declared as not
// written since the load are left to the file. A piece that was once backed up
// otherwise is `stale`: what is in the file may be older.
#pragma once

#include <cstddef>
#include <memory>
#include <vector>

#include "core/file.h"
#include "core/mapped_file.h"
#include "core/range.h"
#include "core/status.h"

namespace cumem {

class Device;
class Digester;
struct Backup;

struct Source {
  std::shared_ptr<const File> file;
  std::unique_ptr<MappedFile> mapped;  // where its pages are to be pinned
  std::vector<FilePart> parts;         // in address order
  bool keep = false;                   // for sleeps too; else it only fills the segment once
  std::vector<Digest> digests;         // of what was read, one a piece; empty: not known
  std::vector<bool> stale;             // one a piece

  std::vector<Range> ranges() const;
};

// What a sleep may leave to the source.
struct Reloadable {
  bool by_digest = false;            // where the device's contents have the load's digests
  std::vector<Range> declared = {};  // otherwise: where these say so
};

// Splits `backup.ranges` into what stays there and `backup.reload`, and lets the file prove
// itself if it is needed. Nothing but these and `source.stale` is changed.
// pre: the device's context is current and nothing writes; `digester` may be null.
Status leave_to_source(Source& source, Backup& backup, const Reloadable& reloadable, Device& device,
                       Digester* digester);

// Was what is now in memory what the file held when it was loaded? At the load itself the
// digests are taken. pre: everything of `backup` was restored; as above.
Status prove_reloaded(Source& source, const Backup& backup, Device& device, Digester* digester);

}  // namespace cumem
