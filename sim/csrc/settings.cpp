// SPDX-License-Identifier: Apache-2.0
#include "settings.h"

#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <mutex>

#include "refusal.h"

namespace rbln_sim {
namespace {

constexpr unsigned kMaxDevices = 64;
constexpr double kMaxMemoryGib = 1024;
constexpr double kDefaultMemoryGib = 16;
constexpr double kMinGbps = 0.001;
constexpr double kMaxGbps = 10'000;
constexpr double kMaxCostUs = 1'000'000;

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
    // Neither hexadecimal digits nor an exponent, as for all other numbers here.
    const bool digits = std::strspn(value, "0123456789.") == std::strlen(value);
    if (!digits || *end != '\0' || gib <= 0 || gib > kMaxMemoryGib) {
      refuse(kInvalid, name, "='", value, "' is not a number of GiB above 0 and up to ",
             kMaxMemoryGib);
    }
  }
  // A multiple of what the chiplets share evenly.
  constexpr uint64_t kUnit = 1 << 20;
  const auto bytes = static_cast<uint64_t>(gib * (1ull << 30));
  return std::max<uint64_t>(bytes / kUnit, 1) * kUnit;
}

double number_of(const char* name, const std::string& text, double low, double high) {
  char* end = nullptr;
  const double number = std::strtod(text.c_str(), &end);
  const bool digits = text.find_first_not_of("0123456789.") == std::string::npos;
  if (text.empty() || !digits || *end != '\0' || number < low || number > high) {
    refuse(kInvalid, name, "='", text_of(name), "': '", text, "' is not a number from ",
           low, " to ", high);
  }
  return number;
}

// Nanoseconds from a number of microseconds.
double cost_of(const char* name) {
  const std::string text = text_of(name);
  return text.empty() ? 0 : number_of(name, text, 0, kMaxCostUs) * 1000;
}

// "58" for both directions, or "58:40" for D2H and H2D.
void speeds_of(const char* name, double& d2h, double& h2d) {
  const std::string text = text_of(name);
  if (text.empty()) return;
  const size_t colon = text.find(':');
  d2h = number_of(name, text.substr(0, colon), kMinGbps, kMaxGbps);
  h2d = colon == std::string::npos
            ? d2h
            : number_of(name, text.substr(colon + 1), kMinGbps, kMaxGbps);
}

Costs costs() {
  Costs read;
  speeds_of("RBLN_SIM_GBPS", read.registered_d2h, read.registered_h2d);
  speeds_of("RBLN_SIM_PAGEABLE_GBPS", read.pageable_d2h, read.pageable_h2d);
  const std::string device_speed = text_of("RBLN_SIM_D2D_GBPS");
  if (!device_speed.empty()) {
    read.d2d = number_of("RBLN_SIM_D2D_GBPS", device_speed, kMinGbps, kMaxGbps);
  }
  read.submission = cost_of("RBLN_SIM_SUBMIT_US");
  read.descriptor = cost_of("RBLN_SIM_DESCRIPTOR_US");
  return read;
}

void schedule_of(const char* name, Settings& read) {
  const std::string text = text_of(name);
  read.schedule_seed = 0;
  if (text.empty() || text == "0") {
    read.schedule = Schedule::kOrdinary;
    return;
  }
  if (text == "latest") {
    read.schedule = Schedule::kLatest;
  } else if (text == "earliest") {
    read.schedule = Schedule::kEarliest;
  } else if (text.find_first_not_of("0123456789") == std::string::npos) {
    read.schedule = Schedule::kSeeded;
    read.schedule_seed = unsigned_of(name, 0, 1, UINT64_MAX);
  } else {
    refuse(kInvalid, name, "='", text,
           "' is neither 'latest', nor 'earliest', nor a seed from 1; 0 or nothing "
           "switches deferred mode off");
  }
  if (read.costs.any()) {
    refuse(kInvalid, name, "='", text,
           "': nothing takes time in deferred mode, but RBLN_SIM_*_GBPS or _US sets a "
           "cost; unset one of them");
  }
}

std::string default_state_dir() {
  const std::string runtime = text_of("XDG_RUNTIME_DIR");
  if (!runtime.empty()) return runtime + "/rbln-sim";
  return "/tmp/rbln-sim-" + std::to_string(getuid());
}

}  // namespace

Settings read_settings() {
  Settings read;
  read.devices =
      static_cast<unsigned>(unsigned_of("RBLN_SIM_DEVICES", 1, 0, kMaxDevices));
  read.memory_bytes = memory_of("RBLN_SIM_MEMORY_GIB");
  read.seed = unsigned_of("RBLN_SIM_SEED", 0, 0, UINT64_MAX);
  read.faults = parse_faults(text_of("RBLN_SIM_FAULTS"));
  read.costs = costs();
  schedule_of("RBLN_SIM_DEFERRED", read);
  read.trace = text_of("RBLN_SIM_TRACE");
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
