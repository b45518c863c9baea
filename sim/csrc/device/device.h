// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "memory/ledger.h"

namespace rbln_sim {

constexpr char kNpuName[] = "RBLN-CR03";

/// A logical device (torch's rbln:N) over one or more NPUs that this process owns.
class Device {
 public:
  Device(uint32_t id, std::vector<unsigned> npus, uint64_t memory_per_npu)
      : ledger(static_cast<unsigned>(npus.size()), memory_per_npu),
        id_(id),
        npus_(std::move(npus)) {}

  uint32_t id() const { return id_; }
  /// Positions among the visible NPUs.
  const std::vector<unsigned>& npus() const { return npus_; }

  Ledger ledger;

 private:
  const uint32_t id_;
  const std::vector<unsigned> npus_;
};

/// Physical ids of the NPUs this process may use, by RBLN_VISIBLE_DEVICES (or the older
/// RBLN_DEVICES, which wins). Opens nothing.
/// Throws Refusal naming the variable if it is malformed.
std::vector<unsigned> visible_npus();

/// Make logical device `id` of the NPUs at positions `npus` of the visible ones, and
/// open those.
/// Throws Refusal if one does not exist, is in another logical device, or is held by
/// another process.
void register_device(uint32_t id, const std::vector<unsigned>& npus);

/// The logical device `id`. If nothing was registered yet, every visible NPU first
/// becomes a device of its own. Throws Refusal.
Device& device(uint32_t id);

/// Whether this process has opened logical device `id`. Opens nothing.
bool is_registered(uint32_t id);

/// The device that the NPU at position `npu` of the visible ones belongs to, or null if
/// this process has not opened it.
Device* device_of_npu(unsigned npu);

}  // namespace rbln_sim
