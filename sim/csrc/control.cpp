// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <cstring>

#include "api.h"
#include "device.h"
#include "memory.h"
#include "rbln_sim.h"
#include "stream.h"

using namespace rbln_sim;

int rbln_sim_device_view(uint64_t vaddr, uint64_t bytes, uint64_t* host_out) {
  return use(__func__, [&] {
    const Range range = resolve(vaddr, bytes);
    // A graph may write any part of it, so nothing counts as overwritten.
    out(host_out) = reinterpret_cast<uint64_t>(
        range.allocation->device_target(range.offset, 0).bytes);
  });
}

int rbln_sim_graph_begin(uint32_t device_id) {
  return use(__func__, [&] { drain_current_stream(device_id); });
}

int rbln_sim_check(char* reason, uint64_t capacity) {
  if (reason != nullptr && capacity > 0) *reason = '\0';
  return guarded(__func__, [&] {
    try {
      visible_npus();
    } catch (const Refusal& refusal) {
      if (reason != nullptr && capacity > 0) {
        const size_t length =
            std::min<size_t>(std::strlen(refusal.what()), capacity - 1);
        std::memcpy(reason, refusal.what(), length);
        reason[length] = '\0';
      }
      throw;
    }
  });
}
