// SPDX-License-Identifier: Apache-2.0
//
// The counters behind torch.rbln.explain(), and the accessors of rbln::MemoryStats.
#include "api/abi.h"
#include "memory/counters.h"
#include "memory/ledger.h"

using namespace rbln_sim;

namespace {

template <size_t N>
void read(const std::array<Tally, N>& tallies, uint64_t* counts, uint64_t* bytes,
          uint32_t room) {
  for (size_t i = 0; i < N && i < room; ++i) {
    counts[i] = tallies[i].count;
    bytes[i] = tallies[i].bytes;
  }
}

void read(const Tally& tally, uint64_t* count, uint64_t* bytes) {
  *count = tally.count;
  *bytes = tally.bytes;
}

}  // namespace

uint32_t rbln_prof_v2v_hidden_num_reasons() { return kHiddenReasons; }
uint32_t rbln_prof_v2v_reject_num_reasons() { return kRejectReasons; }
void rbln_prof_get_v2v_hidden_d2h(uint64_t* counts, uint64_t* bytes, uint32_t n) {
  read(counters().hidden, counts, bytes, n);
}
void rbln_prof_get_v2v_reject(uint64_t* counts, uint64_t* bytes, uint32_t n) {
  read(counters().reject, counts, bytes, n);
}
void rbln_prof_get_host_sync_d2h(uint64_t* count, uint64_t* bytes) {
  read(counters().sync_d2h, count, bytes);
}
void rbln_prof_get_host_sync_h2d(uint64_t* count, uint64_t* bytes) {
  read(counters().sync_h2d, count, bytes);
}
void rbln_prof_get_memory(uint64_t* current, uint64_t* peak) {
  const MemoryGauge gauge = process_memory();
  *current = gauge.current;
  *peak = gauge.peak;
}
void rbln_prof_reset_v2v_hidden_d2h() {
  for (Tally& tally : counters().hidden) tally.reset();
}
void rbln_prof_reset_v2v_reject() {
  for (Tally& tally : counters().reject) tally.reset();
}
void rbln_prof_reset_host_sync_d2h() { counters().sync_d2h.reset(); }
void rbln_prof_reset_host_sync_h2d() { counters().sync_h2d.reset(); }

namespace rbln {

uint64_t MemoryStats::GetAllocatedCurrent() const { return allocated.current; }
uint64_t MemoryStats::GetAllocatedPeak() const { return allocated.peak; }
uint64_t MemoryStats::GetAllocatedTotalAllocated() const {
  return allocated.total_allocated;
}
uint64_t MemoryStats::GetAllocatedTotalFreed() const { return allocated.total_freed; }
uint64_t MemoryStats::GetReservedCurrent() const { return reserved.current; }
uint64_t MemoryStats::GetReservedPeak() const { return reserved.peak; }
uint64_t MemoryStats::GetReservedTotalAllocated() const {
  return reserved.total_allocated;
}
uint64_t MemoryStats::GetReservedTotalFreed() const { return reserved.total_freed; }
uint64_t MemoryStats::GetActiveCurrent() const { return active_current; }
uint64_t MemoryStats::GetActivePeak() const { return active_peak; }
uint64_t MemoryStats::GetCachedCurrent() const { return cached_current; }
uint64_t MemoryStats::GetCachedPeak() const { return cached_peak; }
uint64_t MemoryStats::GetNumAllocRetries() const { return num_alloc_retries; }
uint64_t MemoryStats::GetNumOoms() const { return num_ooms; }
uint64_t MemoryStats::GetNumDeviceAlloc() const { return num_device_alloc; }
uint64_t MemoryStats::GetNumDeviceFree() const { return num_device_free; }

std::map<std::string, uint64_t> MemoryStats::GetMemoryStats() const {
  return {
      {"allocated.current", allocated.current},
      {"allocated.peak", allocated.peak},
      {"allocated.total_allocated", allocated.total_allocated},
      {"allocated.total_freed", allocated.total_freed},
      {"reserved.current", reserved.current},
      {"reserved.peak", reserved.peak},
      {"reserved.total_allocated", reserved.total_allocated},
      {"reserved.total_freed", reserved.total_freed},
      {"active.current", active_current},
      {"active.peak", active_peak},
      {"cached.current", cached_current},
      {"cached.peak", cached_peak},
      {"num_alloc_retries", num_alloc_retries},
      {"num_ooms", num_ooms},
      {"num_device_alloc", num_device_alloc},
      {"num_device_free", num_device_free},
  };
}

}  // namespace rbln
