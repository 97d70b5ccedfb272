// What does a segment go through on its way to being awake?
#pragma once

#include <optional>
#include <vector>

#include "core/digester.h"
#include "core/requests.h"
#include "core/segment.h"
#include "core/status.h"
#include "core/transfer.h"
#include "core/transition.h"

namespace cumem {

// The sleeping segments of a request, in its order.
std::vector<Segment*> select_arriving(const WakeRequest& request, Transition& transition);

// Creates and maps a segment and submits what fills it. pre: its context is current.
// On failure it may be mapped, and copies may be running: wait, then unmap().
// Memory comes from `pool` where there is one and it fits.
Status map_and_restore(Segment& segment, const std::optional<unsigned char>& fill,
                       Transfer& transfer, PhysicalPool* pool = nullptr);

// Waits for what the segment's source was read for and proves that it is what was loaded;
// nothing for other segments. pre: the same; `digester` may be null.
Status wait_and_prove(Segment& segment, Transfer& transfer, Digester* digester);

// Publishes restored segments as awake. Backups that are not to be retained go to
// `spent`, so that they are dropped when the caller lets go of them.
void publish_awake(const std::vector<Segment*>& segments, bool retain, Transition& transition,
                   WakeResult& result, std::vector<Backup>& spent);

// Gives back what was mapped of segments that stay asleep. A refusal leaves one
// asleep with an exact count of mapped bytes; the next sleep or wake goes on from
// there.
void unmap_all(const std::vector<Segment*>& segments);

// Says how much the device of a memory fault has free now.
void add_free_bytes(Device* device, Status& status);

}  // namespace cumem
