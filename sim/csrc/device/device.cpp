// SPDX-License-Identifier: Apache-2.0
#include "device/device.h"

#include <algorithm>
#include <cstdlib>
#include <map>
#include <shared_mutex>
#include <string>

#include "device/owner.h"
#include "refusal.h"
#include "settings.h"

namespace rbln_sim {
namespace {

std::shared_mutex mutex;
std::map<uint32_t, std::unique_ptr<Device>>& devices() {
  static auto* map = new std::map<uint32_t, std::unique_ptr<Device>>();
  return *map;
}

std::vector<unsigned> parse_npus(const char* name, const std::string& value) {
  const unsigned count = read_settings().devices;
  std::vector<unsigned> npus;
  size_t at = 0;
  while ((at = value.find_first_not_of(", \t", at)) != std::string::npos) {
    const size_t end = std::min(value.find_first_of(", \t", at), value.size());
    const std::string token = value.substr(at, end - at);
    at = end;
    const bool digits =
        token.size() <= 4 && token.find_first_not_of("0123456789") == std::string::npos;
    const unsigned npu = digits ? static_cast<unsigned>(std::stoul(token)) : count;
    if (npu >= count) {
      refuse(kInvalid, name, "='", value, "': '", token, "' is not one of the ", count,
             " NPU(s) of this machine (RBLN_SIM_DEVICES)");
    }
    if (std::find(npus.begin(), npus.end(), npu) != npus.end()) {
      refuse(kInvalid, name, "='", value, "': NPU ", npu, " is named twice");
    }
    npus.push_back(npu);
  }
  return npus;
}

void register_locked(uint32_t id, const std::vector<unsigned>& npus) {
  const auto known_device = devices().find(id);
  if (known_device != devices().end()) {
    if (known_device->second->npus() == npus) return;
    refuse(kInvalid, "rbln:", id, " is registered already with other NPUs");
  }
  if (npus.empty()) refuse(kInvalid, "rbln:", id, " has no NPU");
  const std::vector<unsigned> visible = visible_npus();
  std::vector<unsigned> physical;
  for (const unsigned npu : npus) {
    if (npu >= visible.size()) {
      refuse(kInvalid, "rbln:", id, ": there is no NPU ", npu, "; ", visible.size(),
             " visible");
    }
    for (const auto& [other, known] : devices()) {
      const auto& taken = known->npus();
      if (std::find(taken.begin(), taken.end(), npu) != taken.end()) {
        refuse(kInvalid, "rbln:", id, ": NPU ", npu, " belongs to rbln:", other);
      }
    }
    physical.push_back(visible[npu]);
  }
  open_npus(physical);
  devices().emplace(id, std::make_unique<Device>(id, npus, settings().memory_bytes));
}

}  // namespace

std::vector<unsigned> visible_npus() {
  // The vendor's runtime takes both names and prefers the older one.
  for (const char* name : {"RBLN_DEVICES", "RBLN_VISIBLE_DEVICES"}) {
    const char* value = std::getenv(name);
    if (value == nullptr) continue;
    std::vector<unsigned> npus = parse_npus(name, value);
    if (!npus.empty()) return npus;
  }
  std::vector<unsigned> all(read_settings().devices);
  for (unsigned i = 0; i < all.size(); ++i) all[i] = i;
  return all;
}

void register_device(uint32_t id, const std::vector<unsigned>& npus) {
  refuse_forked();
  std::unique_lock<std::shared_mutex> lock(mutex);
  register_locked(id, npus);
}

Device& device(uint32_t id) {
  refuse_forked();
  {
    std::shared_lock<std::shared_mutex> lock(mutex);
    const auto found = devices().find(id);
    if (found != devices().end()) return *found->second;
  }
  std::unique_lock<std::shared_mutex> lock(mutex);
  if (devices().empty()) {
    const size_t count = visible_npus().size();
    for (unsigned npu = 0; npu < count; ++npu) register_locked(npu, {npu});
  }
  const auto found = devices().find(id);
  if (found == devices().end()) {
    refuse(kInvalid, "there is no device rbln:", id, "; ", devices().size(),
           " device(s) known");
  }
  return *found->second;
}

bool is_registered(uint32_t id) {
  std::shared_lock<std::shared_mutex> lock(mutex);
  return devices().count(id) != 0;
}

Device* device_of_npu(unsigned npu) {
  std::shared_lock<std::shared_mutex> lock(mutex);
  for (const auto& [id, known] : devices()) {
    const auto& npus = known->npus();
    if (std::find(npus.begin(), npus.end(), npu) != npus.end()) return known.get();
  }
  return nullptr;
}

}  // namespace rbln_sim
