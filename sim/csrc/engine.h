// SPDX-License-Identifier: Apache-2.0
//
// The copy engine: every byte that is copied because of a call is copied here, in the
// caller's thread or in a stream's.
#pragma once

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
/// The destination of a copy that a fault strikes holds poison while it runs (in
/// deferred mode that of every copy, see Scheduler); of one that fails, the second half
/// stays poison, and waits for it throw (see Stream).
/// Throws Refusal if the device is lost.
uint64_t copy_on(Stream& stream, CopyJob job);

}  // namespace rbln_sim
