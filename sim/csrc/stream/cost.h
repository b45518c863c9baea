// SPDX-License-Identifier: Apache-2.0
//
// Kinds of operations, and the cost model: how long a copy takes. Off unless a setting
// names a cost.
#pragma once

#include <cstdint>

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

struct Costs {
  /// Bytes per nanosecond (GB/s); 0: as fast as the host copies.
  double registered_d2h = 0;
  double registered_h2d = 0;
  double pageable_d2h = 0;
  double pageable_h2d = 0;
  double d2d = 0;
  /// Nanoseconds.
  double submission = 0;
  double descriptor = 0;  // of copies between host and device

  bool any() const;
  /// Nanoseconds of the link that a copy takes: its bytes and, on the host's
  /// link, its descriptors.
  double link_time(Kind kind, bool registered, uint64_t bytes,
                   uint64_t descriptors) const;
};

/// When a copy that begins at `begin` ends. A device has a link per direction, and one
/// for copies inside it: copies on a link share it, first come, first served. Reserves
/// the link's time.
int64_t end_of_copy(Kind kind, uint32_t device, bool registered, uint64_t bytes,
                    uint64_t descriptors, int64_t begin);

}  // namespace rbln_sim
