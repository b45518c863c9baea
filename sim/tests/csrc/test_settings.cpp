// SPDX-License-Identifier: Apache-2.0
#include "settings.h"

#include "harness.h"

using namespace rbln_sim;

namespace {

void clear() {
  for (const char* name : {"RBLN_SIM_DEVICES", "RBLN_SIM_MEMORY_GIB",
                           "RBLN_SIM_STATE_DIR", "XDG_RUNTIME_DIR"}) {
    unsetenv(name);
  }
}

void check_bad(const char* name, const char* value) {
  setenv(name, value, 1);
  CHECK_REFUSED(std::string(name) + "='" + value + "'", read_settings());
  unsetenv(name);
}

}  // namespace

TEST(defaults) {
  clear();
  const Settings read = read_settings();
  CHECK_EQ(read.devices, 1u);
  CHECK_EQ(read.memory_bytes, 16ull << 30);
  CHECK(read.schedule == Schedule::kOrdinary);
  CHECK_EQ(read.seed, 0u);
  CHECK_EQ(read.open_log, "");
  CHECK_EQ(read.state_dir, "/tmp/rbln-sim-" + std::to_string(getuid()));
}

TEST(values) {
  setenv("RBLN_SIM_DEVICES", "8", 1);
  setenv("RBLN_SIM_MEMORY_GIB", "0.5", 1);
  setenv("RBLN_SIM_DEFERRED", "18446744073709551615", 1);
  setenv("RBLN_SIM_SEED", "18446744073709551615", 1);
  setenv("RBLN_SIM_OPEN_LOG", "log", 1);
  setenv("RBLN_SIM_STATE_DIR", "state", 1);
  const Settings read = read_settings();
  CHECK_EQ(read.devices, 8u);
  CHECK_EQ(read.memory_bytes, 512ull << 20);
  CHECK(read.schedule == Schedule::kSeeded);
  CHECK_EQ(read.schedule_seed, UINT64_MAX);
  CHECK_EQ(read.seed, UINT64_MAX);
  CHECK_EQ(read.open_log, "log");
  CHECK_EQ(read.state_dir, "state");
}

TEST(an_empty_value_is_the_default) {
  for (const char* name : {"RBLN_SIM_DEVICES", "RBLN_SIM_MEMORY_GIB",
                           "RBLN_SIM_DEFERRED", "RBLN_SIM_SEED", "RBLN_SIM_TRACE"}) {
    setenv(name, "", 1);
  }
  CHECK_EQ(read_settings().devices, 1u);
  CHECK_EQ(read_settings().memory_bytes, 16ull << 30);
}

TEST(the_state_folder_follows_the_runtime_folder) {
  clear();
  setenv("XDG_RUNTIME_DIR", "/run/user/1", 1);
  CHECK_EQ(read_settings().state_dir, "/run/user/1/rbln-sim");
}

TEST(a_bad_value_is_refused_by_name) {
  for (const char* value : {"x", "-1", "1.5", " 1", "1 ", "65", "+1", "0x1"}) {
    check_bad("RBLN_SIM_DEVICES", value);
  }
  for (const char* value :
       {"x", "0", "-1", "nan", "inf", "1g", "1025", "0x10", "1e2", " 1", "."}) {
    check_bad("RBLN_SIM_MEMORY_GIB", value);
  }
  for (const char* value : {"yes", "-1", "1.5", " 1", "Latest", "1latest", "00"}) {
    check_bad("RBLN_SIM_DEFERRED", value);
  }
  for (const char* value : {"x", "-1", "18446744073709551616", " 1"}) {
    check_bad("RBLN_SIM_SEED", value);
  }
  for (const char* value : {"x", "0", "-1", "nan", "58:", ":58", "1:2:3", "58GB"}) {
    check_bad("RBLN_SIM_GBPS", value);
    check_bad("RBLN_SIM_PAGEABLE_GBPS", value);
  }
  check_bad("RBLN_SIM_D2D_GBPS", "58:58");
  for (const char* value : {"x", "-1", "1e3", "1000001"}) {
    check_bad("RBLN_SIM_SUBMIT_US", value);
    check_bad("RBLN_SIM_DESCRIPTOR_US", value);
  }
  setenv("RBLN_SIM_FAULTS", "fail", 1);
  CHECK_REFUSED("RBLN_SIM_FAULTS: cannot read the rule 'fail'", read_settings());
}

TEST(the_schedule_of_deferred_mode) {
  const auto schedule = [](const char* value) {
    setenv("RBLN_SIM_DEFERRED", value, 1);
    return read_settings().schedule;
  };
  CHECK(schedule("") == Schedule::kOrdinary);
  CHECK(schedule("0") == Schedule::kOrdinary);
  CHECK(schedule("latest") == Schedule::kLatest);
  CHECK(schedule("earliest") == Schedule::kEarliest);
  CHECK(schedule("1") == Schedule::kSeeded);
  CHECK_EQ(read_settings().schedule_seed, 1u);
}

TEST(deferred_mode_has_no_costs) {
  setenv("RBLN_SIM_DEFERRED", "latest", 1);
  setenv("RBLN_SIM_GBPS", "58", 1);
  CHECK_REFUSED("RBLN_SIM_DEFERRED='latest': nothing takes time", read_settings());
}

TEST(costs) {
  CHECK(!read_settings().costs.any());
  setenv("RBLN_SIM_GBPS", "58:40.5", 1);
  setenv("RBLN_SIM_PAGEABLE_GBPS", "6", 1);
  setenv("RBLN_SIM_D2D_GBPS", "100", 1);
  setenv("RBLN_SIM_SUBMIT_US", "4.5", 1);
  setenv("RBLN_SIM_DESCRIPTOR_US", "0.25", 1);
  const Costs read = read_settings().costs;
  CHECK(read.any());
  CHECK_EQ(read.registered_d2h, 58.0);
  CHECK_EQ(read.registered_h2d, 40.5);
  CHECK_EQ(read.pageable_d2h, 6.0);
  CHECK_EQ(read.pageable_h2d, 6.0);
  CHECK_EQ(read.d2d, 100.0);
  CHECK_EQ(read.submission, 4500.0);
  CHECK_EQ(read.descriptor, 250.0);
}

TEST(faults_and_trace) {
  setenv("RBLN_SIM_FAULTS", "fail:h2d:3,lost:0:25", 1);
  setenv("RBLN_SIM_TRACE", "trace", 1);
  CHECK_EQ(read_settings().faults.size(), 2u);
  CHECK_EQ(read_settings().trace, "trace");
}

TEST(settings_are_read_once_and_a_failure_is_not_kept) {
  setenv("RBLN_SIM_DEVICES", "x", 1);
  CHECK_REFUSED("RBLN_SIM_DEVICES", settings());
  setenv("RBLN_SIM_DEVICES", "3", 1);
  CHECK_EQ(settings().devices, 3u);
  setenv("RBLN_SIM_DEVICES", "4", 1);
  CHECK_EQ(settings().devices, 3u);
}

HARNESS_MAIN()
