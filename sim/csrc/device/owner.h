// SPDX-License-Identifier: Apache-2.0
//
// One process owns an NPU at a time. Ownership is an advisory lock on a file per NPU:
// the kernel drops it when the owner ends, however it ends, so no stale lock exists.
#pragma once

#include <vector>

namespace rbln_sim {

/// Open `npus` (physical ids) for this process: all of them, or none and a Refusal that
/// says who holds one. Ids this process already holds are skipped.
void open_npus(const std::vector<unsigned>& npus);

/// Throws Refusal in a process that was forked from an owner: threads, streams and the
/// ownership itself stayed in the parent.
void refuse_forked();

}  // namespace rbln_sim
