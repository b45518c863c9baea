// SPDX-License-Identifier: Apache-2.0
//
// What is not simulated. Each call fails with its own name; the few that may succeed
// say why that is true.
#include "api/api.h"

using namespace rbln_sim;

namespace {

RetCode not_simulated(const char* function, const char* what) {
  return guarded(function, [&] { refuse(kFailure, what, " is not simulated"); });
}

}  // namespace

// True: no session can be begun. torch.profiler asks before it begins one.
RetCode rbln_kineto_is_active(int* active) {
  return guarded(__func__, [&] { out(active) = 0; });
}

RetCode rbln_kineto_begin_session() {
  return not_simulated(__func__, "profiling with torch.profiler");
}

RetCode rbln_kineto_end_session_and_export(void*, void*, int*) {
  return not_simulated(__func__, "profiling with torch.profiler");
}

RetCode rbln_rt_prepare_inputs(void*, const void*, const void*, uint32_t) {
  return not_simulated(__func__, "running a compiled program by handle");
}

RetCode rbln_rt_prepare_outputs(void*, const void*, const void*, uint32_t) {
  return not_simulated(__func__, "running a compiled program by handle");
}

RetCode rbln_rt_run(void*) {
  return not_simulated(__func__, "running a compiled program by handle");
}

namespace rbln {

RetCode rbln_set_file_offloading_enabled(bool enabled) {
  // Switching it off is what torch-rbln does at the end of an offload block.
  if (!enabled) return kSuccess;
  return not_simulated(__func__, "offloading host memory to files");
}

// True: no such file is ever made.
RetCode rbln_release_offload_temp_storage(uint64_t* removed) {
  return guarded(__func__, [&] { out(removed) = 0; });
}

}  // namespace rbln
