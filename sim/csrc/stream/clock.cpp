// SPDX-License-Identifier: Apache-2.0
#include "stream/clock.h"

#include <time.h>
#include <unistd.h>

namespace rbln_sim {
namespace {

constexpr int64_t kSecond = 1'000'000'000;
// A sleep ends some 60 us late, by the kernel's timer slack.
constexpr int64_t kSpin = 150'000;

}  // namespace

int64_t now_ns() {
  timespec now{};
  clock_gettime(CLOCK_MONOTONIC, &now);
  return now.tv_sec * kSecond + now.tv_nsec;
}

void wait_until(int64_t deadline_ns) {
  const int64_t wake = deadline_ns - kSpin;
  while (now_ns() < wake) {
    const timespec until{wake / kSecond, wake % kSecond};
    // Ended early by a signal: then once more.
    clock_nanosleep(CLOCK_MONOTONIC, TIMER_ABSTIME, &until, nullptr);
  }
  while (now_ns() < deadline_ns) {
  }
}

void wait_forever() {
  for (;;) pause();
}

}  // namespace rbln_sim
