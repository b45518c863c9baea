// SPDX-License-Identifier: Apache-2.0
//
// Runs a plan: while one part of host staging is transposed, the copies of the next
// ones are in flight. Any device that torch has streams and events for can use it.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Stream.h>

#include <optional>
#include <stdexcept>
#include <utility>
#include <vector>

#include "plan.h"

namespace kv_transpose {

/// A stream that no other thread uses meanwhile, and pinned and device memory of a few
/// bytes, alike, to see what it is up to.
struct Lane {
  c10::Stream stream;
  at::Tensor probe_to, probe_from;
};

/// What a plan is run with.
struct Resources {
  std::vector<at::Tensor> staging;  // uint8 in host memory; none: copies are in place
  at::Tensor collector;      // device memory to collect segments in, or undefined
  std::optional<Lane> lane;  // without one copies are synchronous
  int threads = 1;           // that transpose at most, the caller included
  // Parts of staging buffers that are used where segments aren't collected: so large,
  // or as the largest segment. They stay in cache, and the first copy ends early.
  int64_t part_bytes = 1 << 20;
  // What is staged in a part at a time, at least, unless a segment is larger.
  int64_t batch_bytes = 256 << 10;
};

/// A transfer failed, and the device can't be asked whether its copies have ended: they
/// may still use its memory.
class NotDrained : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

/// Moves every segment of a plan. Returns when the last copy is complete. With a
/// collector a batch crosses to or from the host as one copy; on one stream, whose
/// order keeps its reuse safe.
///
/// Copies are issued on the lane's stream, behind what the caller's current stream of
/// the device has been given. Failures are those of its own copies, and of what they
/// had to wait for.
///
/// Throws std::invalid_argument before the first copy unless the resources fit the
/// plan. If a copy fails, that is thrown when no copy is in flight and the stream has
/// no more failures to report; NotDrained where that can't be brought about.
void run(const Plan& plan, const Resources& resources);

/// Measures one small copy from layer 0 to staging and to the collector, in
/// microseconds. Throws as run() does.
std::pair<double, double> copy_times(const Plan& plan, const Resources& resources);

/// Waits until nothing is in flight on the lane's stream and it has no failure to
/// report, so that the next transfer is not told of this one's. Returns whether that is
/// so.
bool drain(const Lane& lane);

}  // namespace kv_transpose
