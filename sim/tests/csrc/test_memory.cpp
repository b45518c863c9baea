// SPDX-License-Identifier: Apache-2.0
#include "memory/memory.h"

#include "harness.h"
#include "memory/space.h"

using namespace rbln_sim;

TEST(a_range_is_resolved_to_its_allocation) {
  const uint64_t base = allocate(device(1), 100);
  for (const uint64_t offset : {0, 1, 99}) {
    const Range range = resolve(base + offset, 100 - offset);
    CHECK_EQ(range.allocation->base(), base);
    CHECK_EQ(range.offset, offset);
    CHECK_EQ(range.length, 100 - offset);
    CHECK_EQ(range.allocation->device().id(), 1u);
  }
}

TEST(running_past_the_end_is_refused) {
  const uint64_t base = allocate(device(0), 100);
  allocate(device(0), 100);
  CHECK_REFUSED("run past the end", resolve(base, 101));
  CHECK_REFUSED("run past the end", resolve(base + 99, 2));
  CHECK_REFUSED("run past the end", resolve(base + 1, UINT64_MAX));
  CHECK_REFUSED(hex(base + 1) + " (offset 1)", resolve(base + 1, 100));
  CHECK_REFUSED("[" + hex(base) + ", +100 bytes]", resolve(base, 101));
}

TEST(addresses_outside_are_refused_for_what_they_are) {
  const uint64_t base = allocate(device(0), 100);
  int local = 0;
  CHECK_REFUSED("is not a device address",
                resolve(reinterpret_cast<uint64_t>(&local), 1));
  CHECK_REFUSED("is not a device address", resolve(0, 1));
  CHECK_REFUSED("is in no live allocation", resolve(base + 100, 1));
  CHECK_REFUSED("is in no live allocation", resolve(allocate(device(0), 1) - 1, 1));
}

TEST(a_freed_address_is_stale) {
  const uint64_t base = allocate(device(0), 100);
  release(base);
  CHECK_REFUSED("is stale: its allocation [" + hex(base) + ", +100 bytes] was freed",
                resolve(base + 50, 1));
  CHECK_REFUSED("is stale", release(base));
}

TEST(only_the_base_can_be_freed) {
  const uint64_t base = allocate(device(0), 100);
  CHECK_REFUSED("is inside the allocation", release(base + 1));
  CHECK_REFUSED("is not a device address", release(1));
  CHECK_REFUSED("is inside the allocation", resolve_base(base + 1));
  CHECK_EQ(resolve_base(base)->base(), base);
  release(base);
}

TEST(memory_in_use_goes_with_its_last_user) {
  const uint64_t base = allocate(device(0), 100);
  auto user = resolve(base, 1).allocation;
  user->bind();
  release(base);
  CHECK_REFUSED("is stale", resolve(base, 1));
  CHECK(device(0).ledger.stats().allocated.current > 0);
  user.reset();
  CHECK_EQ(device(0).ledger.stats().allocated.current, 0u);
}

TEST(many_allocations_come_and_go) {
  std::vector<uint64_t> live;
  for (int i = 0; i < 20000; ++i) {
    live.push_back(allocate(device(0), 1 + i % 5000));
    if (live.size() > 100) {
      release(live[i % 100]);
      live.erase(live.begin() + i % 100);
    }
  }
  for (const uint64_t base : live) CHECK_EQ(resolve(base, 1).offset, 0u);
}

TEST(an_empty_allocation_is_refused) {
  CHECK_REFUSED("0 bytes", allocate(device(0), 0));
}

TEST(a_device_address_is_no_host_pointer) {
  const uint64_t base = allocate(device(0), 100);
  char local[8];
  CHECK_EQ(host_pointer(reinterpret_cast<uint64_t>(local), 8), local + 0);
  CHECK_REFUSED("is a device address where a host pointer is wanted",
                host_pointer(base, 1));
  CHECK_REFUSED("is a device address", host_pointer(base + 4096, 1));
  CHECK_REFUSED("null", host_pointer(0, 1));
  CHECK_REFUSED("is a device address", host_pointer(base - 8, 9));
  CHECK_REFUSED("run past the end of all memory", host_pointer(UINT64_MAX - 7, 9));
}

HARNESS_MAIN()
