// SPDX-License-Identifier: Apache-2.0
#include "settings.h"

#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <cmath>
#include <cstdlib>
#include <cstring>
#include <mutex>

#include "refusal.h"

namespace rbln_sim {
namespace {

constexpr unsigned kMaxDevices = 64;
constexpr double kMaxMemoryGib = 1024;
constexpr double kDefaultMemoryGib = 16;

// Part of the design, not of this version. Ignoring one would make a test that relies
// on it pass for the wrong reason.
constexpr const char* kNotSupported[] = {
    "RBLN_SIM_FAULTS",        "RBLN_SIM_WITHOUT",   "RBLN_SIM_GBPS",
    "RBLN_SIM_PAGEABLE_GBPS", "RBLN_SIM_SUBMIT_US", "RBLN_SIM_DESCRIPTOR_US",
    "RBLN_SIM_TRACE",
};

const char* text_of(const char* name) {
  const char* value = std::getenv(name);
  return value != nullptr ? value : "";
}

uint64_t unsigned_of(const char* name, uint64_t fallback, uint64_t low, uint64_t high) {
  const char* value = text_of(name);
  if (*value == '\0') return fallback;
  char* end = nullptr;
  errno = 0;
  const uint64_t number = std::strtoull(value, &end, 10);
  const bool digits = std::strspn(value, "0123456789") == std::strlen(value);
  if (!digits || *end != '\0' || errno != 0 || number < low || number > high) {
    refuse(kInvalid, name, "='", value, "' is not a whole number from ", low, " to ",
           high);
  }
  return number;
}

uint64_t memory_of(const char* name) {
  const char* value = text_of(name);
  double gib = kDefaultMemoryGib;
  if (*value != '\0') {
    char* end = nullptr;
    gib = std::strtod(value, &end);
    if (*end != '\0' || !std::isfinite(gib) || gib <= 0 || gib > kMaxMemoryGib) {
      refuse(kInvalid, name, "='", value, "' is not a number of GiB above 0 and up to ",
             kMaxMemoryGib);
    }
  }
  // A multiple of what the chiplets share evenly.
  constexpr uint64_t kUnit = 1 << 20;
  const auto bytes = static_cast<uint64_t>(gib * (1ull << 30));
  return std::max<uint64_t>(bytes / kUnit, 1) * kUnit;
}

bool flag_of(const char* name) {
  const std::string value = text_of(name);
  if (value.empty() || value == "0") return false;
  if (value == "1") return true;
  refuse(kInvalid, name, "='", value, "' is neither 0 nor 1");
}

std::string default_state_dir() {
  const std::string runtime = text_of("XDG_RUNTIME_DIR");
  if (!runtime.empty()) return runtime + "/rbln-sim";
  return "/tmp/rbln-sim-" + std::to_string(getuid());
}

}  // namespace

Settings read_settings() {
  for (const char* name : kNotSupported) {
    if (*text_of(name) != '\0') {
      refuse(kInvalid, name, " is not supported by this version; unset it");
    }
  }
  Settings read;
  read.devices =
      static_cast<unsigned>(unsigned_of("RBLN_SIM_DEVICES", 1, 0, kMaxDevices));
  read.memory_bytes = memory_of("RBLN_SIM_MEMORY_GIB");
  read.deferred = flag_of("RBLN_SIM_DEFERRED");
  read.seed = unsigned_of("RBLN_SIM_SEED", 0, 0, UINT64_MAX);
  read.open_log = text_of("RBLN_SIM_OPEN_LOG");
  read.state_dir = text_of("RBLN_SIM_STATE_DIR");
  if (read.state_dir.empty()) read.state_dir = default_state_dir();
  return read;
}

const Settings& settings() {
  // Every call comes here, so a reader must not wait for another.
  static std::atomic<const Settings*> instance{nullptr};
  const Settings* read = instance.load(std::memory_order_acquire);
  if (read != nullptr) return *read;
  static std::mutex mutex;
  std::lock_guard<std::mutex> lock(mutex);
  if (instance.load() == nullptr) instance.store(new Settings(read_settings()));
  return *instance.load();
}

}  // namespace rbln_sim
