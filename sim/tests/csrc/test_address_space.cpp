// SPDX-License-Identifier: Apache-2.0
#include "memory/space.h"

#include <signal.h>

#include "harness.h"

using rbln_sim::AddressSpace;

namespace {

// Two fit, a third does not.
constexpr uint64_t kHuge = AddressSpace::kReservation / 8 * 3;

}  // namespace

TEST(ranges_are_aligned_and_have_a_gap_between_them) {
  AddressSpace& space = AddressSpace::instance();
  uint64_t end_of_last = 0;
  for (const uint64_t size : {1ull, 4095ull, 4096ull, 4097ull, 1ull << 20}) {
    const uint64_t base = space.take(size);
    CHECK_EQ(base % AddressSpace::kAlignment, 0u);
    if (end_of_last != 0) CHECK(base >= end_of_last + AddressSpace::kGap);
    end_of_last = base + size;
    CHECK(space.contains(base));
    CHECK(space.contains(base + size - 1));
  }
}

TEST(a_freed_range_is_not_the_next_one_handed_out) {
  AddressSpace& space = AddressSpace::instance();
  const uint64_t first = space.take(4096);
  space.give_back(first);
  for (int i = 0; i < 1000; ++i) CHECK(space.take(4096) != first);
}

TEST(ranges_are_reused_when_no_fresh_one_is_left) {
  AddressSpace& space = AddressSpace::instance();
  const uint64_t first = space.take(kHuge);
  const uint64_t second = space.take(kHuge);
  CHECK(second > first);
  CHECK_REFUSED("is left", space.take(kHuge));
  space.give_back(first);
  CHECK_EQ(space.take(kHuge), first);
}

TEST(a_range_between_live_ones_is_found_again) {
  AddressSpace& space = AddressSpace::instance();
  space.take(4096);
  const uint64_t hole = space.take(1 << 20);
  space.take(kHuge);
  space.take(kHuge);
  space.give_back(hole);
  // Too large for the hole: goes behind everything. Then the hole is the only place.
  const uint64_t rest = space.take(kHuge / 2);
  CHECK(rest > hole);
  CHECK_REFUSED("is left", space.take(kHuge / 2));
  const uint64_t again = space.take(1 << 20);
  CHECK(again == hole || again > rest);
}

TEST(more_than_half_the_space_is_refused) {
  CHECK_REFUSED("cannot reserve", AddressSpace::instance().take(1ull << 63));
}

TEST(foreign_addresses_are_not_contained) {
  int local = 0;
  CHECK(!AddressSpace::instance().contains(reinterpret_cast<uint64_t>(&local)));
  CHECK(!AddressSpace::instance().contains(0));
}

HARNESS_MAIN()
