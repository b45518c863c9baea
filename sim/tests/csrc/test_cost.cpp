// SPDX-License-Identifier: Apache-2.0
#include "stream/cost.h"

#include "harness.h"

using namespace rbln_sim;

namespace {

constexpr uint64_t kBytes = 1'000'000;

void set_costs() {
  setenv("RBLN_SIM_GBPS", "10:5", 1);
  setenv("RBLN_SIM_PAGEABLE_GBPS", "2:1", 1);
  setenv("RBLN_SIM_D2D_GBPS", "100", 1);
  setenv("RBLN_SIM_SUBMIT_US", "4", 1);
  setenv("RBLN_SIM_DESCRIPTOR_US", "1", 1);
}

}  // namespace

TEST(nothing_costs_by_default) {
  CHECK(!Costs().any());
  CHECK_EQ(end_of_copy(Kind::kD2H, 0, true, kBytes, 7, 100), 100);
}

TEST(each_cost_counts) {
  set_costs();
  // Submission 4 us, a descriptor 1 us, then bytes by direction and host memory.
  CHECK_EQ(end_of_copy(Kind::kD2H, 0, true, kBytes, 1, 0), 105'000);
  CHECK_EQ(end_of_copy(Kind::kH2D, 0, true, kBytes, 3, 0), 207'000);
  // Descriptors of copies inside a device cost nothing.
  CHECK_EQ(end_of_copy(Kind::kD2D, 0, true, kBytes, 7, 0), 14'000);
  CHECK_EQ(end_of_copy(Kind::kD2H, 1, false, kBytes, 1, 0), 505'000);
  CHECK_EQ(end_of_copy(Kind::kH2D, 1, false, kBytes, 1, 0), 1'005'000);
}

TEST(copies_of_one_direction_share_the_link) {
  set_costs();
  CHECK_EQ(end_of_copy(Kind::kD2H, 0, true, kBytes, 1, 0), 105'000);
  CHECK_EQ(end_of_copy(Kind::kD2H, 0, true, kBytes, 1, 50'000), 206'000);
  CHECK_EQ(end_of_copy(Kind::kH2D, 0, true, kBytes, 1, 50'000), 255'000);
  CHECK_EQ(end_of_copy(Kind::kD2H, 1, true, kBytes, 1, 50'000), 155'000);
  CHECK_EQ(end_of_copy(Kind::kD2H, 0, true, kBytes, 1, 1'000'000), 1'105'000);
}

HARNESS_MAIN()
