// SPDX-License-Identifier: Apache-2.0
//
// Which operation a fault strikes.
#pragma once

#include <cstdint>
#include <map>
#include <mutex>
#include <set>
#include <vector>

#include "faults/rules.h"

namespace rbln_sim {

/// Decides by rules and a seed. The decision depends on nothing but the sequence of
/// calls, so the same program with the same seed has the same faults.
class FaultSchedule {
 public:
  FaultSchedule(std::vector<FaultRule> rules, uint64_t seed);

  /// Count an operation; the rule that strikes it, or null. The first rule that applies
  /// wins. One line on stderr tells of it.
  /// Throws Refusal if the device is lost.
  const FaultRule* next(Kind kind, uint32_t device);

  /// Throws Refusal if the device is lost.
  void refuse_lost(uint32_t device) const;

 private:
  bool strikes(size_t index, uint64_t position);

  const std::vector<FaultRule> rules_;
  const uint64_t seed_;
  mutable std::mutex mutex_;
  std::vector<uint64_t> counts_;  // by kind
  uint64_t all_ = 0;              // operations of any kind
  std::vector<bool> struck_;      // by rule
  std::map<uint32_t, uint64_t> by_device_;
  std::map<uint32_t, const FaultRule*> lost_;
};

/// The schedule of this process.
FaultSchedule& faults();

}  // namespace rbln_sim
