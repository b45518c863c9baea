// SPDX-License-Identifier: Apache-2.0
#include "engine.h"

#include <cstdint>
#include <cstring>
#include <thread>

#include "settings.h"

namespace rbln_sim {
namespace {

constexpr uint64_t kMinDelayUs = 1000;
constexpr uint64_t kMaxDelayUs = 50000;

// SplitMix64: a random number per position of a sequence, without state.
uint64_t scramble(uint64_t x) {
  x += 0x9E3779B97F4A7C15ull;
  x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9ull;
  x = (x ^ (x >> 27)) * 0x94D049BB133111EBull;
  return x ^ (x >> 31);
}

bool overlap(const CopyJob& job) {
  const auto src = reinterpret_cast<uintptr_t>(job.src);
  const auto dst = reinterpret_cast<uintptr_t>(job.dst);
  return src < dst + job.bytes && dst < src + job.bytes;
}

}  // namespace

std::chrono::microseconds deferred_delay(uint64_t seed, uint64_t stream,
                                         uint64_t position) {
  const uint64_t random = scramble(scramble(seed + stream) + position);
  return std::chrono::microseconds(kMinDelayUs +
                                   random % (kMaxDelayUs - kMinDelayUs + 1));
}

void copy_now(char* dst, const char* src, uint64_t bytes) {
  std::memmove(dst, src, bytes);
}

uint64_t copy_on(Stream& stream, CopyJob job) {
  if (!settings().deferred) {
    return stream.submit(
        [job = std::move(job)] { copy_now(job.dst, job.src, job.bytes); });
  }
  const auto delay = deferred_delay(settings().seed, stream.handle(), stream.newest());
  return stream.submit([job = std::move(job), delay] {
    // Poison would destroy a source that the destination overlaps.
    if (!overlap(job)) std::memset(job.dst, kPoison, job.bytes);
    std::this_thread::sleep_for(delay);
    copy_now(job.dst, job.src, job.bytes);
  });
}

}  // namespace rbln_sim
