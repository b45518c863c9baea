// SPDX-License-Identifier: Apache-2.0
#include "device/device.h"

#include <fstream>
#include <thread>

#include "harness.h"

using namespace rbln_sim;

namespace {

using Npus = std::vector<unsigned>;

void check_visible(const char* value, const Npus& want) {
  setenv("RBLN_VISIBLE_DEVICES", value, 1);
  CHECK(visible_npus() == want);
}

}  // namespace

TEST(without_a_choice_all_npus_are_visible) {
  CHECK((visible_npus() == Npus{0, 1}));
  check_visible("", {0, 1});
  check_visible("  ", {0, 1});
  setenv("RBLN_SIM_DEVICES", "0", 1);
  CHECK(visible_npus().empty());
}

TEST(the_choice_keeps_its_order) {
  setenv("RBLN_SIM_DEVICES", "12", 1);
  check_visible("3", {3});
  check_visible("11,0", {11, 0});
  check_visible(" 2, 1 ", {2, 1});
  check_visible("2 1", {2, 1});
}

TEST(the_older_name_wins) {
  setenv("RBLN_VISIBLE_DEVICES", "0", 1);
  setenv("RBLN_DEVICES", "1", 1);
  CHECK(visible_npus() == Npus{1});
}

TEST(a_malformed_choice_is_refused_by_name) {
  for (const char* value : {"2", "x", "0,0", "-1", "0;1", "0-1", "99999999999"}) {
    setenv("RBLN_VISIBLE_DEVICES", value, 1);
    CHECK_REFUSED("RBLN_VISIBLE_DEVICES='" + std::string(value) + "'", visible_npus());
  }
}

TEST(every_visible_npu_becomes_a_device_at_first_use) {
  CHECK_EQ(device(0).id(), 0u);
  CHECK((device(1).npus() == Npus{1}));
  CHECK_EQ(&device(1), device_of_npu(1));
  CHECK_REFUSED("there is no device rbln:2", device(2));
}

TEST(npus_are_counted_among_the_visible_ones) {
  setenv("RBLN_VISIBLE_DEVICES", "1", 1);
  CHECK((device(0).npus() == Npus{0}));
  CHECK_REFUSED("there is no device", device(1));
  CHECK_EQ(device_of_npu(1), nullptr);
}

TEST(registered_devices_are_the_only_ones) {
  register_device(0, {1});
  CHECK((device(0).npus() == Npus{1}));
  CHECK_EQ(device_of_npu(0), nullptr);
  CHECK_EQ(device_of_npu(1), &device(0));
  CHECK_REFUSED("there is no device rbln:1", device(1));
}

TEST(a_device_may_span_npus) {
  register_device(0, {0, 1});
  CHECK_EQ(device_of_npu(0), device_of_npu(1));
  device(0).ledger.charge(2ull << 30);
  CHECK_REFUSED("out of device memory", device(0).ledger.charge(1));
}

TEST(impossible_registrations_are_refused) {
  CHECK_REFUSED("there is no NPU 2", register_device(0, {2}));
  CHECK_REFUSED("has no NPU", register_device(0, {}));
  register_device(0, {0});
  register_device(0, {0});  // the same again changes nothing
  CHECK_REFUSED("registered already", register_device(0, {1}));
  CHECK_REFUSED("NPU 0 belongs to rbln:0", register_device(1, {0}));
  register_device(1, {1});
  CHECK_EQ(device(1).id(), 1u);
}

TEST(looking_opens_nothing) {
  visible_npus();
  CHECK_EQ(device_of_npu(0), nullptr);
  CHECK(!std::filesystem::exists(getenv("RBLN_SIM_STATE_DIR")));
}

TEST(threads_that_use_it_first_at_once_open_it_once) {
  const std::string log = std::string(getenv("RBLN_SIM_STATE_DIR")) + ".log";
  setenv("RBLN_SIM_OPEN_LOG", log.c_str(), 1);
  std::vector<const Device*> found(8);
  std::vector<std::thread> threads;
  for (size_t t = 0; t < found.size(); ++t) {
    threads.emplace_back([&found, t] { found[t] = &device(t % 2); });
  }
  for (std::thread& thread : threads) thread.join();
  for (size_t t = 0; t < found.size(); ++t) CHECK_EQ(found[t], found[t % 2]);
  std::ifstream lines(log);
  int opens = 0;
  for (std::string line; std::getline(lines, line);) ++opens;
  CHECK_EQ(opens, 2);
}

HARNESS_MAIN()
