// SPDX-License-Identifier: Apache-2.0
//
// What torch.rbln.explain() reads: copies between host and device that the runtime had
// to make, or could not avoid, for a synchronous operation.
#pragma once

#include <array>
#include <atomic>
#include <cstdint>

namespace rbln_sim {

struct Tally {
  std::atomic<uint64_t> count{0};
  std::atomic<uint64_t> bytes{0};

  void add(uint64_t moved) {
    count.fetch_add(1, std::memory_order_relaxed);
    bytes.fetch_add(moved, std::memory_order_relaxed);
  }
  void reset() { count = bytes = 0; }
};

/// Why a device-to-device copy was served on the host. torch-rbln names them by
/// position and expects exactly these.
enum HiddenReason { kSrcNotOnDevice, kSrcDeviceOnly, kSrcSynced, kHiddenReasons };

/// Why a device-to-device plan was rejected; positions as torch-rbln's table, which
/// names these two. The others are internal there and never occur here.
enum RejectReason {
  kRejectNone,
  kRejectSrcNotOnDevice,
  kRejectDtypeMismatch = 4,
  kRejectReasons = 9
};

struct Counters {
  /// Synchronous transfers between device and host memory. Asynchronous copies of
  /// pinned memory are not counted, by definition.
  Tally sync_d2h;
  Tally sync_h2d;
  std::array<Tally, kHiddenReasons> hidden;
  std::array<Tally, kRejectReasons> reject;
};

inline Counters& counters() {
  static Counters* instance = new Counters();
  return *instance;
}

}  // namespace rbln_sim
