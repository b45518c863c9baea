// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "stream/scheduler.h"

namespace rbln_sim {

/// An in-order queue of work. A thread of its own, started by the first work, runs it;
/// in deferred mode the Scheduler does.
///
/// A *ticket* is a position in the queue: work is done when `done(ticket)` holds, which
/// is never before the work has returned and what it kept alive was released.
///
/// Work fails by throwing. What is queued behind it runs nevertheless. The failure is
/// told to every wait for anything that was queued after the failed work and before the
/// failure was first told; work queued after that is free of it.
class Stream : public std::enable_shared_from_this<Stream> {
 public:
  explicit Stream(uint64_t handle) : handle_(handle) {}
  Stream(const Stream&) = delete;
  Stream& operator=(const Stream&) = delete;

  uint64_t handle() const { return handle_; }
  uint32_t device() const { return static_cast<uint32_t>(handle_ >> 32); }

  /// Queue `work` and return its ticket. Throws Refusal if no thread can be started.
  uint64_t submit(Work work);
  /// The ticket of the newest work; 0 if there never was any.
  uint64_t newest() const { return submitted_.load(std::memory_order_acquire); }
  bool done(uint64_t ticket) const {
    return completed_.load(std::memory_order_acquire) >= ticket;
  }
  /// Throws Refusal if the work, or work before it, failed and was not told yet.
  void wait(uint64_t ticket);
  /// Whether the work is done, for a program that asks: it gets to know of a failure
  /// like one that waits, and a loop that asks ends in deferred mode too.
  bool query(uint64_t ticket);
  /// Like `wait` for work that is done.
  void tell_failure(uint64_t ticket);
  /// Whether `wait` would throw. Tells nothing.
  bool failed(uint64_t ticket);

 private:
  friend class Scheduler;

  struct Failed {
    uint64_t ticket;
    std::string message;
    // The newest work when the failure was first told.
    uint64_t told_at = UINT64_MAX;
  };
  // Wants the lock held.
  Failed* failure_before(uint64_t ticket);
  void start();
  void run();
  // Wait, and tell no failure.
  void reach(uint64_t ticket);
  // Look for work for a while. Wants the lock free.
  void poll() const;
  void attempt(const std::function<void()>& work);

  const uint64_t handle_;
  std::mutex mutex_;
  std::condition_variable work_ready_;
  std::condition_variable progress_;
  std::deque<Work> queue_;
  std::atomic<uint64_t> submitted_{0};
  std::atomic<uint64_t> completed_{0};
  std::vector<Failed> failures_;
  std::atomic<bool> ever_failed_{false};
  bool started_ = false;
};

// A stream's handle holds its device in the upper 32 bits and its number there in the
// lower ones; torch-rbln takes them apart. Number 0 is the device's default stream.

/// Make a stream. Throws Refusal if there is no such device.
std::shared_ptr<Stream> create_stream(uint32_t device);
/// Throws Refusal if there is no such stream.
std::shared_ptr<Stream> find_stream(uint64_t handle);
/// The calling thread's current stream of `device`.
std::shared_ptr<Stream> current_stream(uint32_t device);
void set_current_stream(uint32_t device, uint64_t handle);

/// Wait until everything queued so far on the calling thread's current stream is done.
/// Throws Refusal if some of it failed, or the device is lost.
void drain_current_stream(uint32_t device);
/// The same for all streams of `device`.
void drain_device(uint32_t device);

}  // namespace rbln_sim
