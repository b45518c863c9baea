// SPDX-License-Identifier: Apache-2.0
#include "memory/counters.h"

#include "harness.h"

using namespace rbln_sim;

TEST(a_tally_counts_events_and_bytes) {
  Tally tally;
  tally.add(3);
  tally.add(4);
  CHECK_EQ(tally.count.load(), 2u);
  CHECK_EQ(tally.bytes.load(), 7u);
  tally.reset();
  CHECK_EQ(tally.count.load(), 0u);
  CHECK_EQ(tally.bytes.load(), 0u);
}

TEST(the_axes_have_the_length_torch_rbln_expects) {
  CHECK_EQ(counters().hidden.size(), 3u);
  CHECK_EQ(counters().reject.size(), 9u);
  CHECK_EQ(static_cast<int>(kRejectSrcNotOnDevice), 1);
}

HARNESS_MAIN()
