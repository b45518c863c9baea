// SPDX-License-Identifier: Apache-2.0
//
// RBLN_SIM_TRACE: one JSON object per operation, in one write each, so that processes
// may share the file and nothing that ended is lost when one is killed.
#pragma once

#include <cstdint>
#include <optional>

#include "stream/cost.h"

namespace rbln_sim {

struct TraceLine {
  Kind kind;
  /// The thread that called.
  int thread;
  uint64_t bytes;
  uint64_t descriptors;
  uint32_t device;
  /// Number of the stream on its device; none for the calling thread.
  std::optional<uint32_t> stream;
  int64_t begin;
  int64_t end;
  /// For copies.
  Via via = Via::kLink;
  /// Whether a fault made it fail.
  bool failed = false;
};

/// Whether operations of this kind are traced.
/// Throws Refusal naming RBLN_SIM_TRACE if its file cannot be opened.
bool traced(Kind kind);

/// Append a line. A line that cannot be written is told on stderr.
void write_trace(const TraceLine& line);

/// The kernel's number of the calling thread.
int thread_number();

}  // namespace rbln_sim
