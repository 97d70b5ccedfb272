#include "emulator/kernel.h"

#include <cstring>
#include <vector>

#include "emulator/moving.h"

namespace cumem::emulator {
namespace {

constexpr std::uint64_t kAlignment = 16;  // of the kernel's loads

template <class Item>
Range range_of(const Item* items, std::size_t count) {
  return {reinterpret_cast<std::uintptr_t>(items), count * sizeof(Item)};
}

bool can_touch(const World& world, const Context& context, const Range& range, Touch touch) {
  return world.hosts.kind_of(range) == HostKind::kRegistered ||
         world.addresses.reachable(range, context.device.value(), touch);
}

CUresult digest_piece(World& world, Lock& lock, const Context& context, const DigestPiece& piece,
                      Digest* result) {
  const Range source{piece.address, piece.bytes};
  const Range target = range_of(result, 1);
  if (piece.address % kAlignment != 0) return CUDA_ERROR_MISALIGNED_ADDRESS;
  if (!world.addresses.reachable(source, context.device.value(), Touch::kRead) ||
      !can_touch(world, context, target, Touch::kWrite)) {
    return CUDA_ERROR_ILLEGAL_ADDRESS;
  }
  const Moving moving(world, lock, source, target);
  *result = digest_of(reinterpret_cast<const void*>(source.begin), source.bytes);
  return CUDA_SUCCESS;
}

bool is_loaded(const World& world, CUfunction function) {
  return find_module(world, function) != nullptr;
}

CUresult digest_pieces(World& world, Lock& lock, Context& context, const Launch& launch) {
  if (!is_loaded(world, launch.function)) return CUDA_ERROR_LAUNCH_FAILED;
  const Range list = range_of(launch.pieces, launch.count);
  if (!can_touch(world, context, list, Touch::kRead)) return CUDA_ERROR_ILLEGAL_ADDRESS;
  const std::vector<DigestPiece> pieces(launch.pieces, launch.pieces + launch.count);
  const Clock::time_point start = Clock::now();
  std::size_t done = 0;
  for (std::size_t i = 0; i < pieces.size(); ++i) {
    const CUresult result = digest_piece(world, lock, context, pieces[i], launch.digests + i);
    if (result != CUDA_SUCCESS) return result;
    done += pieces[i].bytes;
    const std::uint64_t bandwidth = context.device.machine.bandwidth;
    if (!sleep_until(world, lock, context, start + time_for(done, bandwidth))) break;
  }
  return CUDA_SUCCESS;
}

}  // namespace

void run_digest(World& world, Lock& lock, Context& context, const Launch& launch) {
  const CUresult result = digest_pieces(world, lock, context, launch);
  if (result != CUDA_SUCCESS) world.kill(context, result);
}

}  // namespace cumem::emulator
