// SPDX-License-Identifier: Apache-2.0
#include "clock.h"

#include <algorithm>
#include <vector>

#include "harness.h"

using namespace rbln_sim;

TEST(time_goes_on) {
  const int64_t before = now_ns();
  CHECK(now_ns() >= before);
}

TEST(the_past_is_not_waited_for) {
  wait_until(now_ns() - 1'000'000'000);
  wait_until(0);
}

TEST(a_deadline_is_never_missed_early_and_met_well) {
  // The best of some: on a busy machine a thread may be stopped at any time.
  std::vector<int64_t> late;
  for (int i = 0; i < 50; ++i) {
    const int64_t deadline = now_ns() + 1'000'000;
    wait_until(deadline);
    late.push_back(now_ns() - deadline);
    CHECK(late.back() >= 0);
  }
  CHECK(*std::min_element(late.begin(), late.end()) < 50'000);
}

HARNESS_MAIN()
