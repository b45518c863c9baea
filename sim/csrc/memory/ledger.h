// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <mutex>
#include <vector>

#include "api/abi.h"

namespace rbln_sim {

/// Chiplets of one NPU; vllm-rbln takes a device named RBLN-CR03 only with four.
constexpr unsigned kChiplets = 4;
/// What one allocation takes of a chiplet is a multiple of this.
constexpr uint64_t kGranularity = 4096;

/// The device memory of one logical device: how much of it is taken, and what the
/// allocator statistics say. An allocation is spread evenly over all chiplets.
class Ledger {
 public:
  Ledger(unsigned npus, uint64_t memory_per_npu);

  /// Take device memory for `bytes`; throws Refusal, and counts it, when it is full.
  void charge(uint64_t bytes);
  /// Give back what `charge(bytes)` took.
  void release(uint64_t bytes);

  rbln::MemoryStats stats() const;
  std::vector<std::vector<rbln::MemoryStats>> stats_per_chiplet() const;
  void reset_peaks();
  void reset_totals();
  /// Usage of each NPU of this device (they carry the same).
  RBLNDeviceMemoryInfo usage() const;

 private:
  uint64_t share_of(uint64_t bytes) const;

  const unsigned npus_;
  const uint64_t memory_per_chiplet_;
  mutable std::mutex mutex_;
  rbln::MemoryStats total_;
  // All chiplets carry the same share, so one set of counters stands for each of them;
  // what is counted per event (allocations, OOMs) is reported on the first.
  rbln::MemoryStats chiplet_;
};

/// Usage of an NPU that this process has not opened.
RBLNDeviceMemoryInfo unused_memory(uint64_t memory_per_npu);

/// Device memory of all devices of the process.
struct MemoryGauge {
  uint64_t current;
  uint64_t peak;
};
MemoryGauge process_memory();

}  // namespace rbln_sim
