// Are the bytes in a backup, or in memory that was restored from it, the bytes that
// were put to sleep?
//
// Asked only on request: it costs a read of every byte.
#pragma once

#include <vector>

#include "core/device.h"
#include "core/digester.h"
#include "core/segment.h"
#include "core/status.h"

namespace cumem {

// Computes the digests of device ranges: by the device where `digester` is not
// null, else by reading the memory. pre: the context is current, nothing writes.
Status digest_device(Device& device, Digester* digester, const std::vector<Range>& ranges,
                     std::vector<Digest>& digests);

// The digests of what a backup holds in host memory or on disk, from several threads.
Status digest_backup(const Backup& backup, std::vector<Digest>& digests);

// Success when both lists are the same; else Fault::integrity with the address of
// the first piece that differs. `what` must be static text.
Status compare(const Backup& backup, const std::vector<Digest>& digests, const char* what,
               int device);

}  // namespace cumem
