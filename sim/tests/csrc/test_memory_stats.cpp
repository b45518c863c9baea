// SPDX-License-Identifier: Apache-2.0
#include "api/abi.h"
#include "harness.h"

TEST(the_map_has_what_the_getters_say) {
  rbln::MemoryStats stats;
  stats.allocated = {1, 2, 3, 4};
  stats.reserved = {5, 6, 7, 8};
  stats.active_current = 9;
  stats.active_peak = 10;
  stats.cached_current = 11;
  stats.cached_peak = 12;
  stats.num_alloc_retries = 13;
  stats.num_ooms = 14;
  stats.num_device_alloc = 15;
  stats.num_device_free = 16;
  const std::map<std::string, uint64_t> want = {
      {"allocated.current", stats.GetAllocatedCurrent()},
      {"allocated.peak", stats.GetAllocatedPeak()},
      {"allocated.total_allocated", stats.GetAllocatedTotalAllocated()},
      {"allocated.total_freed", stats.GetAllocatedTotalFreed()},
      {"reserved.current", stats.GetReservedCurrent()},
      {"reserved.peak", stats.GetReservedPeak()},
      {"reserved.total_allocated", stats.GetReservedTotalAllocated()},
      {"reserved.total_freed", stats.GetReservedTotalFreed()},
      {"active.current", stats.GetActiveCurrent()},
      {"active.peak", stats.GetActivePeak()},
      {"cached.current", stats.GetCachedCurrent()},
      {"cached.peak", stats.GetCachedPeak()},
      {"num_alloc_retries", stats.GetNumAllocRetries()},
      {"num_ooms", stats.GetNumOoms()},
      {"num_device_alloc", stats.GetNumDeviceAlloc()},
      {"num_device_free", stats.GetNumDeviceFree()},
  };
  CHECK(stats.GetMemoryStats() == want);
  uint64_t sum = 0;
  for (const auto& [name, value] : want) sum += value;
  CHECK_EQ(sum, 16u * 17 / 2);
}

TEST(the_layout_is_sixteen_counters_in_order) {
  rbln::MemoryStats stats;
  uint64_t raw[16];
  for (uint64_t i = 0; i < 16; ++i) raw[i] = i;
  std::memcpy(static_cast<void*>(&stats), raw, sizeof raw);
  CHECK_EQ(stats.GetAllocatedCurrent(), 0u);
  CHECK_EQ(stats.GetReservedCurrent(), 4u);
  CHECK_EQ(stats.GetActivePeak(), 9u);
  CHECK_EQ(stats.GetNumDeviceFree(), 15u);
}

HARNESS_MAIN()
