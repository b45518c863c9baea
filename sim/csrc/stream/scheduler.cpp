// SPDX-License-Identifier: Apache-2.0
#include "stream/scheduler.h"

#include <algorithm>
#include <cstring>

#include "stream/clock.h"
#include "stream/random.h"
#include "stream/stream.h"

namespace rbln_sim {
namespace {

// Questions about a stream of which the last one is answered with "done".
constexpr int kPatience = 3;

bool overlap(const char* a, const char* b, uint64_t a_bytes, uint64_t b_bytes) {
  const auto first = reinterpret_cast<uintptr_t>(a);
  const auto second = reinterpret_cast<uintptr_t>(b);
  return first < second + b_bytes && second < first + a_bytes;
}

}  // namespace

void poison(const Copied& copied) {
  const auto [dst, src, bytes] = copied;
  if (bytes != 0 && !overlap(dst, src, bytes, bytes)) std::memset(dst, kPoison, bytes);
}

uint64_t Scheduler::random_at(uint64_t position) const {
  return scramble(scramble(seed_) + position);
}

bool Scheduler::needs(const Copied& copied) const {
  const auto [dst, src, bytes] = copied;
  for (const auto& [handle, queue] : queues_) {
    for (const Item& item : queue.items) {
      const Copied& other = item.work.copied;
      if (overlap(dst, other.dst, bytes, other.bytes)) return true;
      if (overlap(dst, other.src, bytes, other.bytes)) return true;
    }
  }
  return false;
}

uint64_t Scheduler::submit(Stream& stream, Work work) {
  std::lock_guard<std::mutex> lock(mutex_);
  // Work that this one is ordered behind is queued here or done, so no byte is
  // poisoned that something may still read.
  const auto found = queues_.find(stream.handle());
  const bool poisoned = found == queues_.end() || !needs(work.copied);
  if (poisoned) poison(work.copied);
  Queue& queue = queues_[stream.handle()];
  queue.stream = &stream;
  queue.items.push_back({std::move(work), ++submitted_, poisoned});
  const uint64_t ticket = stream.submitted_.load(std::memory_order_relaxed) + 1;
  stream.submitted_.store(ticket, std::memory_order_release);
  advance();
  return ticket;
}

bool Scheduler::run_first(uint64_t handle, bool waited_for) {
  Queue& queue = queues_.at(handle);
  const Work& work = queue.items.front().work;
  if (work.due == Work::Due::kNever) return false;
  if (work.due == Work::Due::kWhenWaitedFor && !waited_for) return false;
  // A mark lies before everything queued later: this does not come back here.
  if (work.behind && !run_until(*work.behind, work.mark, waited_for)) return false;
  queue.stream->attempt(work.run);
  queue.items.pop_front();
  queue.stream->completed_.fetch_add(1, std::memory_order_release);
  if (queue.items.empty()) {
    queues_.erase(handle);
  } else if (Item& next = queue.items.front(); !next.poisoned) {
    poison(next.work.copied);
    next.poisoned = true;
  }
  return true;
}

bool Scheduler::run_until(Stream& stream, uint64_t ticket, bool waited_for) {
  while (!stream.done(ticket)) {
    if (!run_first(stream.handle(), waited_for)) return false;
  }
  return true;
}

void Scheduler::advance() {
  if (schedule_ == Schedule::kSeeded) {
    // Mostly none, now and then some. How often is up to the seed, too: some are like
    // kEarliest, most like kLatest.
    const uint64_t sides = 2ull << random_at(0) % 4;
    for (uint64_t dice = random(); dice % sides == 0 && !queues_.empty();
         dice /= sides) {
      auto chosen = queues_.begin();
      std::advance(chosen, random() % queues_.size());
      run_first(chosen->first, false);
    }
  }
  if (schedule_ == Schedule::kEarliest) {
    std::vector<Stream*> all;
    for (const auto& [handle, queue] : queues_) all.push_back(queue.stream);
    for (Stream* stream : all) run_until(*stream, stream->newest(), false);
  }
}

void Scheduler::wait(Stream& stream, uint64_t ticket) {
  {
    std::lock_guard<std::mutex> lock(mutex_);
    advance();
    if (run_until(stream, ticket, true)) return;
  }
  wait_forever();
}

bool Scheduler::query(Stream& stream, uint64_t ticket) {
  std::lock_guard<std::mutex> lock(mutex_);
  advance();
  if (stream.done(ticket)) return true;
  Queue& queue = queues_.at(stream.handle());
  if (++queue.asked < kPatience) return false;
  queue.asked = 0;
  return run_until(stream, ticket, true);
}

void Scheduler::run_all(
    const std::vector<std::pair<std::shared_ptr<Stream>, uint64_t>>& until) {
  std::lock_guard<std::mutex> lock(mutex_);
  auto left = until;
  for (;;) {
    // Where an edge between two streams is missing, what was queued last runs first.
    auto chosen = left.end();
    uint64_t best = 0;
    for (auto it = left.begin(); it != left.end(); ++it) {
      if (it->first->done(it->second)) continue;
      const uint64_t number = queues_.at(it->first->handle()).items.front().number;
      const uint64_t rank = schedule_ == Schedule::kSeeded ? random() : number;
      if (chosen != left.end() && rank <= best) continue;
      chosen = it;
      best = rank;
    }
    if (chosen == left.end()) return;
    if (!run_first(chosen->first->handle(), true)) left.erase(chosen);
  }
}

Scheduler* scheduler() {
  static Scheduler* const instance =
      settings().schedule == Schedule::kOrdinary
          ? nullptr
          : new Scheduler(settings().schedule, settings().schedule_seed);
  return instance;
}

}  // namespace rbln_sim
