// SPDX-License-Identifier: Apache-2.0
//
// The copy engine: every byte that is copied because of a call is copied here, in the
// caller's thread or in a stream's.
#pragma once

#include <chrono>
#include <memory>

#include "kind.h"
#include "stream.h"

namespace rbln_sim {

struct CopyJob {
  Kind kind;
  char* dst;
  const char* src;
  uint64_t bytes;
  // What must live until the job is done.
  std::shared_ptr<const void> dst_owner;
  std::shared_ptr<const void> src_owner;
};

/// Copy now, in the calling thread. Source and destination may overlap.
void copy_now(char* dst, const char* src, uint64_t bytes);

/// Queue the copy on `stream` and return its ticket.
///
/// In deferred mode it takes 1 to 50 ms and its destination holds poison from its start
/// to its end, in stream order. The delay depends on the seed, the stream and the
/// position of the copy in the stream.
///
/// A copy that a fault strikes holds poison likewise; of one that fails, the second
/// half stays poison, and waits for it throw (see Stream).
/// Throws Refusal if the device is lost.
uint64_t copy_on(Stream& stream, CopyJob job);

constexpr unsigned char kPoison = 0xA5;

/// How long the copy at `position` of `stream` takes in deferred mode.
std::chrono::microseconds deferred_delay(uint64_t seed, uint64_t stream,
                                         uint64_t position);

}  // namespace rbln_sim
