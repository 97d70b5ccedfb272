// Does the core say truly what it has, and name what went wrong?
#include <set>
#include <string>

#include "core_rig.h"

namespace {

using cumem::Fault;
using cumem::Owner;
using rig::Rig;

TEST(an_owner_is_known_at_every_address_of_its_segment_and_can_be_put_right) {
  Rig r;
  const CUdeviceptr a = r.make(2 * kChunk);
  r.allocator->assign(a, Owner{"draft", "discard", 7, false});
  for (const CUdeviceptr at : {a, a + 1, a + 2 * kChunk - 1}) {
    const std::optional<Owner> owner = r.allocator->owner_of(at);
    REQUIRE(owner.has_value());
    CHECK(owner->tag == "draft");
    CHECK_EQ(owner->pool, std::uint64_t{7});
  }
  CHECK(!r.allocator->owner_of(a + 2 * kChunk).has_value());
  CHECK(!r.allocator->owner_of(1).has_value());
  r.allocator->assign(a + 1, Owner{"other", "offload", 8, false});  // no start of a segment
  CHECK(r.allocator->owner_of(a)->tag == "draft");
  r.allocator->free(a);
  r.expect_empty();
}

TEST(a_range_is_awake_only_if_all_of_it_is) {
  Rig r;
  const CUdeviceptr a = r.make(kChunk);
  r.allocator->assign(a, Owner{"weights", "offload", 3, false});
  CHECK(r.allocator->sleeping_pools().empty());
  CHECK(r.allocator->is_awake(a, kChunk));
  CHECK(r.allocator->is_awake(a, 0));
  CHECK(!r.allocator->is_awake(a - 1, 2));
  REQUIRE(r.sleep({Rig::whole(a, kChunk)}).ok());
  CHECK(!r.allocator->is_awake(a, 0));
  CHECK(r.allocator->sleeping_pools() == std::vector<std::uint64_t>{3});
  REQUIRE(r.wake({a}).ok());
  CHECK(r.allocator->sleeping_pools().empty());
  r.allocator->free(a);
  r.expect_empty();
}

TEST(every_fault_has_a_name_of_its_own) {
  std::set<std::string> names;
  int faults = 0;
  for (; faults <= static_cast<int>(Fault::driver); ++faults)
    names.insert(cumem::fault_name(static_cast<Fault>(faults)));
  CHECK_EQ(names.size(), static_cast<std::size_t>(faults));
  CHECK(names.count("device_memory") == 1);
  CHECK(std::string(cumem::fault_name(static_cast<Fault>(200))) == "driver");
}

}  // namespace
