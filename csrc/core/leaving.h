// What does a segment go through on its way to sleep?
//
// Shared by sleep, which saves all segments before it releases the first, and by
// switch, which goes segment by segment.
#pragma once

#include <vector>

#include "core/requests.h"
#include "core/segment.h"
#include "core/status.h"
#include "core/transition.h"

namespace cumem {

// A segment on its way to sleep, with the backup that it will have.
struct Leaving {
  Segment* segment = nullptr;
  Backup backup;
  std::vector<Range> unchanged;
  Store store = Store::host;

  bool wants_copy() const noexcept {
    return segment->state == SegmentState::awake && !backup.ranges.empty();
  }
  bool wants_host_memory() const noexcept {
    return wants_copy() && store != Store::disk && backup.host.bytes() == 0;
  }
  bool wants_disk() const noexcept {
    return wants_copy() && store == Store::disk && backup.disk.bytes() == 0;
  }
};

// Picks the segments there is something to do for: awake ones, and sleeping ones
// whose memory the driver would not take back last time. Fails, with nothing
// changed, when a plan does not fit its segment.
Status select_leaving(const SleepRequest& request, Transition& transition,
                      std::vector<Leaving>& leaving);

// Takes over the backups that segments kept since they woke. One with other ranges
// is of no use: its memory goes back to the arena before new memory is taken.
void take_kept_backups(std::vector<Leaving>& leaving, Transition& transition);

// Leaves to its source what that still holds; see Note [Source]. What was loaded and goes
// to sleep another way counts as changed from then on. pre: the segment's device was waited
// for and its context is current; `digester` may be null.
Status leave_to_source(Leaving& item, CleanCheck check, Digester* digester);

// Takes files for the backups that go to disk, all of them or none.
Status take_disk(std::vector<Leaving>& leaving, const std::string& folder);

// Publishes a saved segment as asleep and gives its memory back. When the driver
// refuses, it is awake if nothing of it was unmapped, else asleep with an exact
// count of mapped bytes and a whole backup. With a pool the memory goes there.
Status release(Leaving& item, Transition& transition, SleepResult& result,
               PhysicalPool* pool = nullptr);

}  // namespace cumem
