// SPDX-License-Identifier: Apache-2.0
//
// Deferred mode: when queued work runs. Nothing here waits for a clock, and no thread
// is started: work runs in the threads that call, where the schedule says so.
#pragma once

#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <utility>
#include <vector>

#include "settings.h"

namespace rbln_sim {

class Stream;

constexpr unsigned char kPoison = 0xA5;

/// What queued work copies; nothing if `bytes` is 0.
struct Copied {
  char* dst = nullptr;
  const char* src = nullptr;
  uint64_t bytes = 0;
};

/// Fill the destination, unless the source overlaps it.
void poison(const Copied& copied);

/// What is queued on a stream.
struct Work {
  /// When it may run, at the earliest.
  enum class Due { kAnyTime, kWhenWaitedFor, kNever };

  Work() = default;
  template <typename Run>
  Work(Run run_)  // NOLINT: any function is work
      : run(std::move(run_)) {}

  std::function<void()> run;
  /// It runs after what `behind` holds up to the ticket `mark`.
  std::shared_ptr<Stream> behind;
  uint64_t mark = 0;
  // For deferred mode:
  Copied copied;
  Due due = Due::kAnyTime;
};

/// Keeps the work of all streams and runs it inside calls of wait(), query(), submit().
/// Each decision depends on the seed and on the calls so far, by any thread, alone.
///
/// What a copy writes holds poison until it has run: from its submission on, unless it
/// or earlier work still needs those bytes; then from when it is the next of its
/// stream.
class Scheduler {
 public:
  Scheduler(Schedule schedule, uint64_t seed) : schedule_(schedule), seed_(seed) {}

  /// Queue work and return its ticket on the stream.
  uint64_t submit(Stream& stream, Work work);
  /// Return when the ticket is done; never, if it is behind work that never runs.
  void wait(Stream& stream, uint64_t ticket);
  /// Whether the ticket is done. While it is not, the third question about its stream
  /// is answered by running what is missing, so that a loop that asks ends.
  bool query(Stream& stream, uint64_t ticket);
  /// Run all that can run before these tickets, what was queued last first.
  void run_all(const std::vector<std::pair<std::shared_ptr<Stream>, uint64_t>>& until);

 private:
  struct Item {
    Work work;
    uint64_t number;  // in the order of submission, over all streams
    bool poisoned;
  };
  struct Queue {
    Stream* stream = nullptr;
    std::deque<Item> items;
    int asked = 0;
  };

  // All of these want the lock held.
  uint64_t random() { return random_at(++decisions_); }
  uint64_t random_at(uint64_t position) const;
  /// Run what the schedule lets run without anything waiting for it.
  void advance();
  /// Run the first of a stream's queue. False: it must not run now. `waited_for`:
  /// something waits for it.
  bool run_first(uint64_t handle, bool waited_for);
  bool run_until(Stream& stream, uint64_t ticket, bool waited_for);
  /// Whether work that is queued reads or writes bytes that this copy is to write.
  bool needs(const Copied& copied) const;

  const Schedule schedule_;
  const uint64_t seed_;
  std::mutex mutex_;
  std::map<uint64_t, Queue> queues_;  // by the stream's handle; none is empty
  uint64_t submitted_ = 0;
  uint64_t decisions_ = 0;
};

/// The scheduler of this process; null in ordinary mode.
Scheduler* scheduler();

}  // namespace rbln_sim
