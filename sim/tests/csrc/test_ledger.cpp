// SPDX-License-Identifier: Apache-2.0
#include "memory/ledger.h"

#include "harness.h"

using namespace rbln_sim;

namespace {

constexpr uint64_t kNpu = 64 << 20;
constexpr uint64_t kUnit = kChiplets * kGranularity;

}  // namespace

TEST(an_allocation_is_spread_evenly_in_whole_pieces) {
  Ledger ledger(1, kNpu);
  ledger.charge(1);
  const auto per_chiplet = ledger.stats_per_chiplet();
  CHECK_EQ(per_chiplet.size(), 1u);
  CHECK_EQ(per_chiplet[0].size(), size_t{kChiplets});
  for (const auto& chiplet : per_chiplet[0]) {
    CHECK_EQ(chiplet.allocated.current, kGranularity);
    CHECK_EQ(chiplet.reserved.current, kGranularity);
    CHECK_EQ(chiplet.active_current, kGranularity);
  }
  CHECK_EQ(ledger.stats().allocated.current, kUnit);
  ledger.charge(kUnit + 1);
  CHECK_EQ(ledger.stats().allocated.current, 3 * kUnit);
}

TEST(usage_adds_up) {
  Ledger ledger(1, kNpu);
  ledger.charge(10 * kUnit);
  const RBLNDeviceMemoryInfo usage = ledger.usage();
  CHECK_EQ(usage.total, kNpu);
  CHECK_EQ(usage.used, 10 * kUnit);
  CHECK_EQ(usage.free, kNpu - 10 * kUnit);
  CHECK_EQ(usage.chiplets, kChiplets);
  for (unsigned i = 0; i < kMaxChiplets; ++i) {
    const RBLNChipletMemory& chiplet = usage.chiplet[i];
    CHECK_EQ(chiplet.total, i < kChiplets ? kNpu / kChiplets : 0);
    CHECK_EQ(chiplet.used, i < kChiplets ? 10 * kGranularity : 0);
    CHECK_EQ(chiplet.free, chiplet.total - chiplet.used);
    CHECK_EQ(chiplet.largest_free, chiplet.free);
  }
  CHECK_EQ(unused_memory(kNpu).used, 0u);
  CHECK_EQ(unused_memory(kNpu).free, kNpu);
}

TEST(a_device_of_two_npus_has_the_memory_of_both) {
  Ledger ledger(2, kNpu);
  ledger.charge(2 * kNpu);
  CHECK_EQ(ledger.stats().allocated.current, 2 * kNpu);
  CHECK_EQ(ledger.stats_per_chiplet().size(), 2u);
  CHECK_EQ(ledger.usage().free, 0u);
  CHECK_REFUSED("out of device memory", ledger.charge(1));
}

TEST(out_of_memory_takes_nothing_and_is_counted) {
  Ledger ledger(1, kNpu);
  ledger.charge(kNpu - kUnit);
  CHECK_REFUSED(std::to_string(kUnit) + " of " + std::to_string(kNpu) + " bytes free",
                ledger.charge(kUnit + 1));
  CHECK_EQ(ledger.stats().num_ooms, 1u);
  CHECK_EQ(ledger.stats_per_chiplet()[0][0].num_ooms, 1u);
  CHECK_EQ(ledger.stats_per_chiplet()[0][1].num_ooms, 0u);
  CHECK_EQ(ledger.stats().allocated.current, kNpu - kUnit);
  ledger.charge(kUnit);
  CHECK_REFUSED("out of device memory", ledger.charge(UINT64_MAX - kUnit));
}

TEST(peaks_and_totals) {
  Ledger ledger(1, kNpu);
  ledger.charge(kUnit);
  ledger.charge(2 * kUnit);
  ledger.release(kUnit);
  rbln::MemoryStats stats = ledger.stats();
  CHECK_EQ(stats.allocated.current, 2 * kUnit);
  CHECK_EQ(stats.allocated.peak, 3 * kUnit);
  CHECK_EQ(stats.allocated.total_allocated, 3 * kUnit);
  CHECK_EQ(stats.allocated.total_freed, kUnit);
  CHECK_EQ(stats.num_device_alloc, 2u);
  CHECK_EQ(stats.num_device_free, 1u);
  ledger.reset_peaks();
  CHECK_EQ(ledger.stats().allocated.peak, 2 * kUnit);
  CHECK_EQ(ledger.stats_per_chiplet()[0][3].active_peak, 2 * kGranularity);
  CHECK_EQ(ledger.stats().allocated.total_freed, kUnit);
  ledger.reset_totals();
  stats = ledger.stats();
  CHECK_EQ(stats.allocated.total_allocated, 0u);
  CHECK_EQ(stats.allocated.total_freed, 0u);
  CHECK_EQ(stats.num_device_alloc, 0u);
  CHECK_EQ(stats.allocated.current, 2 * kUnit);
}

TEST(the_process_gauge_covers_all_devices) {
  Ledger first(1, kNpu), second(1, kNpu);
  first.charge(kUnit);
  second.charge(kUnit);
  first.release(kUnit);
  CHECK_EQ(process_memory().current, kUnit);
  CHECK_EQ(process_memory().peak, 2 * kUnit);
}

HARNESS_MAIN()
