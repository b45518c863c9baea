// SPDX-License-Identifier: Apache-2.0
//
// Detection, registration and the figures of devices. Detection opens nothing; an NPU
// that another process holds counts like any other.
#include <cstring>

#include "api/api.h"
#include "device/device.h"

using namespace rbln_sim;

namespace {

unsigned check_npu(int npu) {
  const size_t count = visible_npus().size();
  if (npu < 0 || static_cast<size_t>(npu) >= count) {
    refuse(kInvalid, "there is no NPU ", npu, "; ", count, " visible");
  }
  return static_cast<unsigned>(npu);
}

}  // namespace

uint32_t rbln_abi_current() { return kAbiCurrent; }
uint32_t rbln_abi_min_supported() { return kAbiMinSupported; }
bool rbln_runtime_available() { return true; }

RetCode rbln_get_device_count(int* count) {
  return guarded(__func__,
                 [&] { out(count) = static_cast<int>(visible_npus().size()); });
}

RetCode rbln_register_device_id(int torch_device, int* npus, int count) {
  return use(__func__, [&] {
    if (torch_device < 0 || count < 0) {
      refuse(kInvalid, "device ", torch_device, " of ", count, " NPU(s)");
    }
    if (static_cast<size_t>(count) > visible_npus().size()) {
      refuse(kInvalid, "rbln:", torch_device, " of ", count, " NPUs; ",
             visible_npus().size(), " visible");
    }
    if (npus == nullptr && count > 0) refuse(kInvalid, "the list of NPUs is null");
    std::vector<unsigned> positions;
    for (int i = 0; i < count; ++i) {
      if (npus[i] < 0) refuse(kInvalid, "there is no NPU ", npus[i]);
      positions.push_back(static_cast<unsigned>(npus[i]));
    }
    register_device(static_cast<uint32_t>(torch_device), positions);
  });
}

RetCode rbln_get_device_properties(int npu, RBLNDeviceProperties* properties) {
  return guarded(__func__, [&] {
    check_npu(npu);
    const uint64_t memory = read_settings().memory_bytes;
    RBLNDeviceProperties& filled = out(properties);
    filled = {};
    static_assert(sizeof kNpuName <= sizeof filled.name);
    std::memcpy(filled.name, kNpuName, sizeof kNpuName);
    filled.total_memory = memory;
    filled.memory_per_chiplet = memory / kChiplets;
    filled.chiplets = kChiplets;
  });
}

RetCode rbln_get_device_memory_info(int npu, RBLNDeviceMemoryInfo* info) {
  return guarded(__func__, [&] {
    refuse_forked();
    const Device* known = device_of_npu(check_npu(npu));
    out(info) = known != nullptr ? known->ledger.usage()
                                 : unused_memory(read_settings().memory_bytes);
  });
}

RetCode rbln_empty_cache(int torch_device) {
  // Freed memory is never cached, so nothing is left to give back.
  return use(__func__, [&] { device(static_cast<uint32_t>(torch_device)); });
}

RetCode rbln_reset_accumulated_memory_stats(int torch_device) {
  return use(__func__, [&] {
    device(static_cast<uint32_t>(torch_device)).ledger.reset_totals();
  });
}

RetCode rbln_reset_peak_memory_stats(int torch_device) {
  return use(__func__,
             [&] { device(static_cast<uint32_t>(torch_device)).ledger.reset_peaks(); });
}

rbln::MemoryStats rbln_get_memory_stats(int torch_device) {
  rbln::MemoryStats stats;
  use(__func__,
      [&] { stats = device(static_cast<uint32_t>(torch_device)).ledger.stats(); });
  return stats;
}

std::vector<std::vector<rbln::MemoryStats>> rbln_get_memory_stats_per_chiplet(
    int torch_device) {
  std::vector<std::vector<rbln::MemoryStats>> stats;
  use(__func__, [&] {
    stats = device(static_cast<uint32_t>(torch_device)).ledger.stats_per_chiplet();
  });
  return stats;
}
