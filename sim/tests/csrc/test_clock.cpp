// SPDX-License-Identifier: Apache-2.0
#include "stream/clock.h"

#include <algorithm>
#include <cstdint>

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
  // The best of many: on a busy machine a thread may be stopped at any time.
  int64_t least_late = INT64_MAX;
  for (int i = 0; i < 50 || (i < 20'000 && least_late >= 50'000); ++i) {
    const int64_t deadline = now_ns() + 1'000'000;
    wait_until(deadline);
    const int64_t late = now_ns() - deadline;
    CHECK(late >= 0);
    least_late = std::min(least_late, late);
  }
  CHECK(least_late < 50'000);
}

HARNESS_MAIN()
