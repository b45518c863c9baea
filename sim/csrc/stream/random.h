// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>

namespace rbln_sim {

/// SplitMix64: a random number per position of a sequence, without state.
inline uint64_t scramble(uint64_t x) {
  x += 0x9E3779B97F4A7C15ull;
  x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9ull;
  x = (x ^ (x >> 27)) * 0x94D049BB133111EBull;
  return x ^ (x >> 31);
}

}  // namespace rbln_sim
