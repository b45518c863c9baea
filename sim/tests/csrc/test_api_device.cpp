// SPDX-License-Identifier: Apache-2.0
#include "api/abi.h"
#include "harness.h"

namespace {

bool opened_anything() { return std::filesystem::exists(getenv("RBLN_SIM_STATE_DIR")); }

}  // namespace

TEST(the_abi_window_is_6) {
  CHECK_EQ(rbln_abi_current(), 6u);
  CHECK_EQ(rbln_abi_min_supported(), 6u);
  CHECK(rbln_runtime_available());
}

TEST(detection_opens_nothing) {
  int count = 0;
  CHECK_EQ(rbln_get_device_count(&count), kSuccess);
  CHECK_EQ(count, 2);
  RBLNDeviceProperties properties;
  CHECK_EQ(rbln_get_device_properties(1, &properties), kSuccess);
  CHECK_EQ(std::string(properties.name), "RBLN-CR03");
  CHECK_EQ(properties.total_memory, 1ull << 30);
  CHECK_EQ(properties.memory_per_chiplet, 1ull << 28);
  CHECK_EQ(properties.chiplets, 4u);
  RBLNDeviceMemoryInfo info;
  CHECK_EQ(rbln_get_device_memory_info(0, &info), kSuccess);
  CHECK_EQ(info.used, 0u);
  CHECK(!opened_anything());
}

TEST(detection_follows_the_environment_until_the_first_use) {
  int count = 0;
  setenv("RBLN_SIM_DEVICES", "5", 1);
  rbln_get_device_count(&count);
  CHECK_EQ(count, 5);
  setenv("RBLN_VISIBLE_DEVICES", "3,4", 1);
  rbln_get_device_count(&count);
  CHECK_EQ(count, 2);
  setenv("RBLN_VISIBLE_DEVICES", "7", 1);
  CHECK_FAILS(kInvalid, "rbln_get_device_count: RBLN_VISIBLE_DEVICES='7'",
              rbln_get_device_count(&count));
}

TEST(an_npu_that_does_not_exist_is_refused) {
  RBLNDeviceProperties properties;
  RBLNDeviceMemoryInfo info;
  for (const int npu : {-1, 2}) {
    CHECK_FAILS(kInvalid, "there is no NPU " + std::to_string(npu),
                rbln_get_device_properties(npu, &properties));
    CHECK_FAILS(kInvalid, "there is no NPU " + std::to_string(npu),
                rbln_get_device_memory_info(npu, &info));
  }
  CHECK_FAILS(kInvalid, "null", rbln_get_device_count(nullptr));
  CHECK_FAILS(kInvalid, "null", rbln_get_device_properties(0, nullptr));
}

TEST(registering_opens) {
  int npus[] = {0};
  CHECK_EQ(rbln_register_device_id(0, npus, 1), kSuccess);
  CHECK(opened_anything());
  int impossible[] = {-1};
  CHECK_FAILS(kInvalid, "rbln_register_device_id: there is no NPU -1",
              rbln_register_device_id(1, impossible, 1));
  CHECK_FAILS(kInvalid, "rbln_register_device_id",
              rbln_register_device_id(-1, npus, 1));
  CHECK_FAILS(kInvalid, "the list of NPUs is null",
              rbln_register_device_id(1, nullptr, 1));
  // Refused before the list, which is shorter, is read.
  CHECK_FAILS(kInvalid, "of 2147483647 NPUs; 2 visible",
              rbln_register_device_id(1, npus, 2147483647));
}

TEST(usage_moves) {
  uint64_t vaddr;
  CHECK_EQ(rbln::rbln_malloc_eager(1, 1 << 20, vaddr), kSuccess);
  RBLNDeviceMemoryInfo info;
  CHECK_EQ(rbln_get_device_memory_info(1, &info), kSuccess);
  CHECK_EQ(info.used, 1u << 20);
  CHECK_EQ(info.free, (1u << 30) - (1u << 20));
  CHECK_EQ(rbln_get_device_memory_info(0, &info), kSuccess);
  CHECK_EQ(info.used, 0u);
  CHECK_EQ(rbln_get_memory_stats(1).GetAllocatedCurrent(), 1u << 20);
  const auto per_chiplet = rbln_get_memory_stats_per_chiplet(1);
  CHECK_EQ(per_chiplet.size(), 1u);
  CHECK_EQ(per_chiplet[0].size(), 4u);
  CHECK_EQ(per_chiplet[0][3].GetAllocatedCurrent(), 1u << 18);
  rbln::rbln_free(vaddr);
  CHECK_EQ(rbln_reset_peak_memory_stats(1), kSuccess);
  CHECK_EQ(rbln_get_memory_stats(1).GetAllocatedPeak(), 0u);
  CHECK_EQ(rbln_get_memory_stats(1).GetAllocatedTotalFreed(), 1u << 20);
  CHECK_EQ(rbln_reset_accumulated_memory_stats(1), kSuccess);
  CHECK_EQ(rbln_get_memory_stats(1).GetAllocatedTotalFreed(), 0u);
  CHECK_EQ(rbln_empty_cache(1), kSuccess);
}

TEST(a_device_that_does_not_exist_is_refused) {
  CHECK_FAILS(kInvalid, "there is no device rbln:2", rbln_empty_cache(2));
  CHECK_FAILS(kInvalid, "there is no device rbln:2", rbln_reset_peak_memory_stats(2));
  CHECK_FAILS(kInvalid, "there is no device rbln:2",
              rbln_reset_accumulated_memory_stats(2));
  CHECK_FAILS(size_t{0}, "there is no device rbln:2",
              rbln_get_memory_stats_per_chiplet(2).size());
}

TEST(a_wrong_setting_fails_every_use_by_name) {
  setenv("RBLN_SIM_FAULTS", "file", 1);
  int count;
  uint64_t vaddr;
  CHECK_FAILS(kInvalid, "RBLN_SIM_FAULTS", rbln_get_device_count(&count));
  CHECK_FAILS(kInvalid, "RBLN_SIM_FAULTS", rbln::rbln_malloc_lazy(0, 1, vaddr));
}

HARNESS_MAIN()
