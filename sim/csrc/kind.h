// SPDX-License-Identifier: Apache-2.0
#pragma once

namespace rbln_sim {

/// What faults count, what the cost model prices and what the trace tells.
enum class Kind { kD2H, kH2D, kD2D, kGraph, kSync, kAlloc };
constexpr unsigned kKinds = 6;

/// How the bytes of a copy went.
enum class Via {
  /// Between host and device memory, or between device addresses, as asked for.
  kLink,
  /// Served from host memory, where the newest bytes were or may wait: nothing crossed.
  kHost,
  /// They crossed because of the residency, inside a call that asked for no such copy.
  kHidden
};

}  // namespace rbln_sim
