// How much memory can the host still give?
#pragma once

#include <cstddef>
#include <string>

namespace cumem {

// What the host could still give now without reclaiming from others: the
// kernel's estimate, or less where a control group allows less. Both count pages of files
// that are not in use; `pinned` bytes of these are. `root` is where /proc and /sys are.
std::size_t available_host_bytes(std::size_t pinned = 0, const std::string& root = "");

}  // namespace cumem
