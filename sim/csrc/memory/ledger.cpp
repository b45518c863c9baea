// SPDX-License-Identifier: Apache-2.0
#include "memory/ledger.h"

#include <algorithm>

#include "refusal.h"

namespace rbln_sim {
namespace {

std::mutex gauge_mutex;
MemoryGauge gauge{0, 0};

void move_gauge(int64_t bytes) {
  std::lock_guard<std::mutex> lock(gauge_mutex);
  gauge.current += static_cast<uint64_t>(bytes);
  gauge.peak = std::max(gauge.peak, gauge.current);
}

void add(rbln::MemoryStats::Group& group, uint64_t bytes) {
  group.current += bytes;
  group.peak = std::max(group.peak, group.current);
  group.total_allocated += bytes;
}

void subtract(rbln::MemoryStats::Group& group, uint64_t bytes) {
  group.current -= bytes;
  group.total_freed += bytes;
}

// Nothing is cached: a free gives memory back at once, so what is reserved from the
// device is what is allocated.
void add(rbln::MemoryStats& stats, uint64_t bytes) {
  add(stats.allocated, bytes);
  add(stats.reserved, bytes);
  stats.active_current += bytes;
  stats.active_peak = std::max(stats.active_peak, stats.active_current);
}

void subtract(rbln::MemoryStats& stats, uint64_t bytes) {
  subtract(stats.allocated, bytes);
  subtract(stats.reserved, bytes);
  stats.active_current -= bytes;
}

void reset_peaks_of(rbln::MemoryStats& stats) {
  stats.allocated.peak = stats.allocated.current;
  stats.reserved.peak = stats.reserved.current;
  stats.active_peak = stats.active_current;
  stats.cached_peak = stats.cached_current;
}

void reset_totals_of(rbln::MemoryStats& stats) {
  stats.allocated.total_allocated = stats.allocated.total_freed = 0;
  stats.reserved.total_allocated = stats.reserved.total_freed = 0;
  stats.num_alloc_retries = stats.num_ooms = 0;
  stats.num_device_alloc = stats.num_device_free = 0;
}

RBLNDeviceMemoryInfo usage_of(uint64_t total, uint64_t used) {
  RBLNDeviceMemoryInfo info{};
  info.granularity = kGranularity;
  info.chiplets = kChiplets;
  for (unsigned i = 0; i < kChiplets; ++i) {
    // Memory never fragments here; huge pages are not simulated (0: the part has none).
    info.chiplet[i] = {total, used, total - used, total - used, 0};
    info.total += total;
    info.used += used;
    info.free += total - used;
  }
  return info;
}

}  // namespace

Ledger::Ledger(unsigned npus, uint64_t memory_per_npu)
    : npus_(npus), memory_per_chiplet_(memory_per_npu / kChiplets) {}

uint64_t Ledger::share_of(uint64_t bytes) const {
  const uint64_t unit = uint64_t{npus_} * kChiplets * kGranularity;
  return (bytes + unit - 1) / unit * kGranularity;
}

void Ledger::charge(uint64_t bytes) {
  const uint64_t share = share_of(bytes);
  const uint64_t all = share * npus_ * kChiplets;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    const uint64_t used = chiplet_.allocated.current;
    if (share > memory_per_chiplet_ - used) {
      ++total_.num_ooms;
      refuse(kFailure, "out of device memory: ", bytes, " bytes asked for, ",
             (memory_per_chiplet_ - used) * npus_ * kChiplets, " of ",
             memory_per_chiplet_ * npus_ * kChiplets,
             " bytes free; RBLN_SIM_MEMORY_GIB sets the size of an NPU");
    }
    add(chiplet_, share);
    add(total_, all);
    ++total_.num_device_alloc;
  }
  move_gauge(static_cast<int64_t>(all));
}

void Ledger::release(uint64_t bytes) {
  const uint64_t share = share_of(bytes);
  const uint64_t all = share * npus_ * kChiplets;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    subtract(chiplet_, share);
    subtract(total_, all);
    ++total_.num_device_free;
  }
  move_gauge(-static_cast<int64_t>(all));
}

rbln::MemoryStats Ledger::stats() const {
  std::lock_guard<std::mutex> lock(mutex_);
  return total_;
}

std::vector<std::vector<rbln::MemoryStats>> Ledger::stats_per_chiplet() const {
  std::lock_guard<std::mutex> lock(mutex_);
  std::vector<std::vector<rbln::MemoryStats>> all(
      npus_, std::vector<rbln::MemoryStats>(kChiplets, chiplet_));
  rbln::MemoryStats& first = all[0][0];
  first.num_alloc_retries = total_.num_alloc_retries;
  first.num_ooms = total_.num_ooms;
  first.num_device_alloc = total_.num_device_alloc;
  first.num_device_free = total_.num_device_free;
  return all;
}

void Ledger::reset_peaks() {
  std::lock_guard<std::mutex> lock(mutex_);
  reset_peaks_of(total_);
  reset_peaks_of(chiplet_);
}

void Ledger::reset_totals() {
  std::lock_guard<std::mutex> lock(mutex_);
  reset_totals_of(total_);
  reset_totals_of(chiplet_);
}

RBLNDeviceMemoryInfo Ledger::usage() const {
  std::lock_guard<std::mutex> lock(mutex_);
  return usage_of(memory_per_chiplet_, chiplet_.allocated.current);
}

RBLNDeviceMemoryInfo unused_memory(uint64_t memory_per_npu) {
  return usage_of(memory_per_npu / kChiplets, 0);
}

MemoryGauge process_memory() {
  std::lock_guard<std::mutex> lock(gauge_mutex);
  return gauge;
}

}  // namespace rbln_sim
