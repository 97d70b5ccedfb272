// How much memory can the host still give?
#pragma once

#include <cstddef>
#include <string>

namespace cumem {

// available_host_bytes() of host_piece.h, for a host whose /proc and /sys are under `root`.
std::size_t available_host_bytes(std::size_t pinned, const std::string& root);

}  // namespace cumem
