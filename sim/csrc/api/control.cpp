// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <cstring>
#include <map>

#include "api/api.h"
#include "api/rbln_sim.h"
#include "device/device.h"
#include "faults/faults.h"
#include "memory/memory.h"
#include "stream/operation.h"
#include "stream/stream.h"

using namespace rbln_sim;

namespace {

// Graphs of the calling thread between begin and end, by device.
thread_local std::map<uint32_t, Operation> running_graphs;

}  // namespace

int rbln_sim_device_view(uint64_t vaddr, uint64_t bytes, uint64_t* host_out) {
  return use(__func__, [&] {
    const Range range = resolve(vaddr, bytes);
    faults().refuse_lost(range.allocation->device().id());
    // A graph may write any part of it, so nothing counts as overwritten.
    out(host_out) = reinterpret_cast<uint64_t>(
        range.allocation->device_target(range.offset, 0).bytes);
  });
}

int rbln_sim_graph_begin(uint32_t device_id) {
  return use(__func__, [&] {
    drain_current_stream(device_id);
    Operation graph({Kind::kGraph, device_id});
    graph.start();
    if (graph.fails()) graph.finish();
    running_graphs.insert_or_assign(device_id, graph);
  });
}

int rbln_sim_graph_end(uint32_t device_id) {
  return use(__func__, [&] {
    const auto found = running_graphs.find(device_id);
    if (found == running_graphs.end()) {
      refuse(kInvalid, "no graph was begun on rbln:", device_id, " by this thread");
    }
    Operation graph = found->second;
    running_graphs.erase(found);
    graph.finish();
  });
}

int rbln_sim_allocation(uint64_t vaddr, uint64_t* base, uint64_t* bytes) {
  return use(__func__, [&] {
    const auto allocation = resolve(vaddr, 1).allocation;
    out(base) = allocation->base();
    out(bytes) = allocation->size();
  });
}

int rbln_sim_device_opened(uint32_t device_id, uint32_t* opened) {
  return use(__func__, [&] { out(opened) = is_registered(device_id) ? 1 : 0; });
}

int rbln_sim_host_view_known(uint64_t vaddr, uint32_t known) {
  return use(__func__,
             [&] { resolve(vaddr, 1).allocation->set_host_view_known(known != 0); });
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
