// SPDX-License-Identifier: Apache-2.0
#include "api/abi.h"
#include "harness.h"

TEST(what_is_not_simulated_fails_by_name) {
  int dropped;
  CHECK_FAILS(kFailure, "rbln_kineto_begin_session:", rbln_kineto_begin_session());
  CHECK_FAILS(kFailure, "rbln_kineto_end_session_and_export:",
              rbln_kineto_end_session_and_export(nullptr, nullptr, &dropped));
  CHECK_FAILS(kFailure, "rbln_rt_prepare_inputs:",
              rbln_rt_prepare_inputs(nullptr, nullptr, nullptr, 0));
  CHECK_FAILS(kFailure, "rbln_rt_prepare_outputs:",
              rbln_rt_prepare_outputs(nullptr, nullptr, nullptr, 0));
  CHECK_FAILS(kFailure, "rbln_rt_run:", rbln_rt_run(nullptr));
  CHECK_FAILS(kFailure, "rbln_set_file_offloading_enabled:",
              rbln::rbln_set_file_offloading_enabled(true));
}

TEST(true_answers_are_given) {
  int active = 1;
  CHECK_EQ(rbln_kineto_is_active(&active), kSuccess);
  CHECK_EQ(active, 0);
  uint64_t removed = 42;
  CHECK_EQ(rbln::rbln_release_offload_temp_storage(&removed), kSuccess);
  CHECK_EQ(removed, 0u);
  CHECK_EQ(rbln::rbln_set_file_offloading_enabled(false), kSuccess);
}

HARNESS_MAIN()
