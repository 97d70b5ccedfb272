#include "emulator/allocate.h"

#include <utility>

namespace cumem::emulator {
namespace {

CUmemAllocationProp plain_prop(const Device& device) {
  CUmemAllocationProp prop{};
  prop.type = CU_MEM_ALLOCATION_TYPE_PINNED;
  prop.location.type = CU_MEM_LOCATION_TYPE_DEVICE;
  prop.location.id = device.value();
  return prop;
}

CUresult put(World& world, const Range& range, std::shared_ptr<Physical> physical) {
  CUmemAccessDesc owner{};
  owner.location = physical->prop.location;
  owner.flags = CU_MEM_ACCESS_FLAGS_PROT_READWRITE;
  const CUresult mapped = world.addresses.map(range, std::move(physical));
  if (mapped != CUDA_SUCCESS) return mapped;
  const CUresult granted = world.addresses.set_access(range, {owner});
  if (granted != CUDA_SUCCESS) world.addresses.unmap(range);
  return granted;
}

}  // namespace

CUresult create_physical(Session& session, Device& device, const PhysicalRequest& request,
                         std::shared_ptr<Physical>* made) {
  Extent extent;
  const CUresult taken = device.backing.take(request.bytes, &extent);
  if (taken != CUDA_SUCCESS) return taken;
  const std::uint64_t id = session.world.fresh_number();
  session.lock.unlock();
  const CUresult filled = extent.fill(id);
  session.lock.lock();
  if (filled != CUDA_SUCCESS) return filled;
  *made = std::make_shared<Physical>(Physical{id, device, request.prop, std::move(extent)});
  return CUDA_SUCCESS;
}

CUresult allocate_plain(Session& session, Device& device, std::size_t bytes,
                        std::uintptr_t* begin) {
  std::shared_ptr<Physical> physical;
  const CUresult created = create_physical(session, device, {plain_prop(device), bytes}, &physical);
  if (created != CUDA_SUCCESS) return created;
  AddressSpace& addresses = session.world.addresses;
  Range range{0, bytes};
  const CUresult reserved =
      addresses.reserve({bytes, kGranularity, 0}, device.machine, Use::kPlain, &range.begin);
  if (reserved != CUDA_SUCCESS) return reserved;
  const CUresult result = put(session.world, range, std::move(physical));
  if (result == CUDA_SUCCESS) {
    *begin = range.begin;
  } else {
    addresses.release(range);
  }
  return result;
}

CUresult free_plain(World& world, std::uintptr_t begin) {
  const Reservation* const home = world.addresses.reservation_at(begin);
  if (home == nullptr || home->use != Use::kPlain) return CUDA_ERROR_INVALID_VALUE;
  const Range range = home->addresses.range();
  if (range.begin != begin) return CUDA_ERROR_INVALID_VALUE;
  const CUresult unmapped = world.addresses.unmap(range);
  return unmapped == CUDA_SUCCESS ? world.addresses.release(range) : unmapped;
}

}  // namespace cumem::emulator
