// SPDX-License-Identifier: Apache-2.0
#pragma once

namespace rbln_sim {

/// What faults count, what the cost model prices and what the trace tells.
enum class Kind { kD2H, kH2D, kD2D, kGraph, kSync, kAlloc };
constexpr unsigned kKinds = 6;

}  // namespace rbln_sim
