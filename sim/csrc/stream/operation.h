// SPDX-License-Identifier: Apache-2.0
//
// What a program makes an NPU do, as faults, the cost model and the trace see it: one
// operation per call, a batch of copies included.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <type_traits>

#include "faults/rules.h"
#include "stream/cost.h"
#include "stream/scheduler.h"
#include "stream/stream.h"

namespace rbln_sim {

/// One operation. It is counted by the constructor, in the thread that calls, so the
/// n-th of a kind is the n-th that the program asked for. It then runs between start()
/// and finish(), in the calling thread or in a stream's.
class Operation {
 public:
  struct What {
    Kind kind;
    uint32_t device;
    uint64_t bytes = 0;
    /// Contiguous pieces of a copy.
    uint64_t descriptors = 0;
    /// A copy that residency makes inside a call that asked for none.
    bool hidden = false;
  };
  /// How much of a copy crosses the link; the rest is served from host memory.
  struct Crossing {
    uint64_t bytes = 0;
    uint64_t descriptors = 0;

    Crossing& operator+=(const Crossing& more) {
      bytes += more.bytes;
      descriptors += more.descriptors;
      return *this;
    }
  };

  /// `stream` is the stream's number on its device; none in the calling thread.
  /// Throws Refusal if the device is lost, or the trace cannot be written.
  explicit Operation(const What& what, std::optional<uint32_t> stream = std::nullopt);

  /// One that the program did not ask for: no fault counts it or strikes it.
  static Operation uncounted(const What& what) { return Operation(what, nullptr); }

  /// Whether a fault will delay it, or keep it from being done.
  bool disturbed() const { return fault_ != nullptr; }
  /// Whether it is to fail in finish(), half done.
  bool fails() const { return fault_ != nullptr && fails_of(*fault_); }
  /// When it may run in deferred mode, where a fault takes no time: a delayed one, and
  /// one that hangs for a while, runs only when something waits for it.
  Work::Due due() const;
  /// Take the time, then delay or hang if a fault says so.
  /// Throws Refusal if it hung for as long as the fault says.
  void start();
  /// All of a copy crosses the link, unless this says otherwise.
  void crossed(const Crossing& crossing) { crossing_ = crossing; }
  /// Last for as long as the cost model says, then write the trace.
  /// Throws Refusal if it was to fail.
  void finish();

 private:
  Operation(const What& what, const FaultRule* fault);

  What what_;
  Crossing crossing_;
  std::optional<uint32_t> stream_;
  int thread_;
  const FaultRule* fault_;
  int64_t begin_ = 0;
};

/// Run `body(pieces)` as an operation in the calling thread. `pieces` is how many of
/// the descriptors to do: all of them, or half if it is to fail. It is not run where
/// half of them is none. That of a copy may return what crossed the link.
template <typename Body>
void perform(const Operation::What& what, Body&& body) {
  Operation operation(what);
  const auto run = [&](uint64_t pieces) {
    if constexpr (std::is_void_v<decltype(body(pieces))>) {
      body(pieces);
    } else {
      operation.crossed(body(pieces));
    }
  };
  operation.start();
  if (!operation.fails()) {
    run(what.descriptors);
  } else if (what.descriptors > 1) {
    run(what.descriptors / 2);
  }
  operation.finish();
}

/// Run `body`, which makes a copy that residency needs inside another operation, if one
/// is needed: it returns what crossed the link. It takes its modelled time and is
/// traced as hidden.
template <typename Body>
void perform_hidden(Kind kind, uint32_t device, uint64_t bytes, Body&& body) {
  Operation operation = Operation::uncounted({kind, device, bytes, 1, true});
  operation.start();
  const Operation::Crossing crossing = body();
  if (crossing.bytes != 0) operation.finish();
}

// The copy engine: every byte that is copied because of a call is copied here, in the
// caller's thread or in a stream's.

struct CopyJob {
  Kind kind;
  char* dst;
  const char* src;
  uint64_t bytes;
  // What must live until the job is done.
  std::shared_ptr<const void> dst_owner;
  std::shared_ptr<const void> src_owner;
};

/// Copy now, in the calling thread. Source and destination may overlap.
void copy_now(char* dst, const char* src, uint64_t bytes);

/// Queue the copy on `stream` and return its ticket.
///
/// The destination of a copy that a fault strikes holds poison while it runs (in
/// deferred mode that of every copy, see Scheduler); of one that fails, the second half
/// stays poison, and waits for it throw (see Stream).
/// Throws Refusal if the device is lost.
uint64_t copy_on(Stream& stream, CopyJob job);

}  // namespace rbln_sim
