// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <memory>
#include <mutex>

#include "stream/stream.h"

namespace rbln_sim {

/// A marker in a stream. One that was never recorded counts as done.
class Event {
 public:
  explicit Event(uint64_t handle) : handle_(handle) {}

  uint32_t device() const { return static_cast<uint32_t>(handle_ >> 32); }
  /// Mark the end of what is queued on `stream` now; an earlier mark is forgotten.
  void record(std::shared_ptr<Stream> stream);
  /// Both throw Refusal if what is before the mark failed; see Stream.
  bool done() const;
  void synchronize() const;
  /// Let what is queued on `stream` from now on wait for the mark as it is now.
  void hold(Stream& stream) const;

 private:
  struct Mark {
    std::shared_ptr<Stream> stream;
    uint64_t ticket = 0;
  };
  Mark mark() const;

  const uint64_t handle_;
  mutable std::mutex mutex_;
  Mark mark_;
};

// Handles are made like those of streams and are never 0.

/// Throws Refusal if there is no such device.
uint64_t create_event(uint32_t device);
/// Throws Refusal if there is no such event. Waits for it go on unharmed.
void destroy_event(uint64_t handle);
/// Throws Refusal if there is no such event.
std::shared_ptr<Event> find_event(uint64_t handle);

}  // namespace rbln_sim
