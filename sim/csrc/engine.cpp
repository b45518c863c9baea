// SPDX-License-Identifier: Apache-2.0
#include "engine.h"

#include <cstdint>
#include <cstring>
#include <thread>

#include "operation.h"
#include "random.h"
#include "settings.h"

namespace rbln_sim {
namespace {

constexpr uint64_t kMinDelayUs = 1000;
constexpr uint64_t kMaxDelayUs = 50000;

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
  Operation operation({job.kind, stream.device(), job.bytes, 1},
                      static_cast<uint32_t>(stream.handle()));
  const bool deferred = settings().deferred;
  const auto delay =
      deferred ? deferred_delay(settings().seed, stream.handle(), stream.newest())
               : std::chrono::microseconds(0);
  return stream.submit([job = std::move(job), operation, deferred, delay]() mutable {
    // Poison would destroy a source that the destination overlaps.
    if ((deferred || operation.disturbed()) && !overlap(job)) {
      std::memset(job.dst, kPoison, job.bytes);
    }
    operation.start();
    if (deferred) std::this_thread::sleep_for(delay);
    copy_now(job.dst, job.src, operation.fails() ? job.bytes / 2 : job.bytes);
    operation.finish();
  });
}

}  // namespace rbln_sim
