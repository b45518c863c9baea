// SPDX-License-Identifier: Apache-2.0
//
// The accessors of rbln::MemoryStats that torch-rbln calls.
#include "abi.h"

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
