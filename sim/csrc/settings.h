// SPDX-License-Identifier: Apache-2.0
//
// RBLN_SIM_* environment variables. The other RBLN_* names belong to the vendor.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "faults/rules.h"
#include "stream/cost.h"

namespace rbln_sim {

/// When queued work runs.
enum class Schedule {
  /// In a thread per stream, as soon as it can.
  kOrdinary,
  /// When something waits for it.
  kLatest,
  /// When it is queued.
  kEarliest,
  /// Anywhere between, by a seed.
  kSeeded
};

struct Settings {
  /// RBLN_SIM_DEVICES: number of NPUs in the machine.
  unsigned devices;
  /// RBLN_SIM_MEMORY_GIB: memory of one NPU.
  uint64_t memory_bytes;
  /// RBLN_SIM_DEFERRED.
  Schedule schedule;
  uint64_t schedule_seed;
  /// RBLN_SIM_SEED: seed of faults by probability.
  uint64_t seed;
  /// RBLN_SIM_FAULTS: what goes wrong; empty for nothing.
  std::vector<FaultRule> faults;
  /// RBLN_SIM_GBPS, _PAGEABLE_GBPS, _D2D_GBPS, _SUBMIT_US and _DESCRIPTOR_US.
  Costs costs;
  /// RBLN_SIM_TRACE: file that gets one JSON line per operation; empty for none.
  std::string trace;
  /// RBLN_SIM_OPEN_LOG: file that gets one JSON line per opened NPU; empty for none.
  std::string open_log;
  /// RBLN_SIM_STATE_DIR: folder of the files that mark NPUs as owned.
  std::string state_dir;
};

/// Read the environment.
/// Throws Refusal naming the variable if a value cannot be parsed.
Settings read_settings();

/// The settings of this process, read when it first uses an NPU. Detection, which may
/// come before a program has set everything, uses read_settings() instead.
const Settings& settings();

}  // namespace rbln_sim
