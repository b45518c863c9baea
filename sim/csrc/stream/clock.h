// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>

namespace rbln_sim {

/// Nanoseconds of CLOCK_MONOTONIC.
int64_t now_ns();

/// Return at `deadline_ns` of the same clock, to some microseconds: it sleeps, then
/// spins for the last part. At once if that is over.
void wait_until(int64_t deadline_ns);

/// Never return. A real hang ends with the process too: neither a stream's thread nor
/// a signal handler waits for this one.
[[noreturn]] void wait_forever();

}  // namespace rbln_sim
