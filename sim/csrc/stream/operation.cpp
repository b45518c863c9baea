// SPDX-License-Identifier: Apache-2.0
#include "stream/operation.h"

#include <chrono>
#include <cstdint>
#include <cstring>
#include <utility>

#include "faults/faults.h"
#include "refusal.h"
#include "settings.h"
#include "stream/clock.h"
#include "stream/cost.h"
#include "stream/trace.h"

namespace rbln_sim {
namespace {

bool is_copy(Kind kind) {
  return kind == Kind::kD2H || kind == Kind::kH2D || kind == Kind::kD2D;
}

}  // namespace

Operation::Operation(const What& what, std::optional<uint32_t> stream)
    : what_(what),
      crossing_{what.bytes, what.descriptors},
      stream_(stream),
      thread_(traced(what.kind) ? thread_number() : 0),
      fault_(faults().next(what.kind, what.device)) {}

Operation::Operation(const What& what, const FaultRule* fault)
    : what_(what),
      crossing_{what.bytes, what.descriptors},
      thread_(traced(what.kind) ? thread_number() : 0),
      fault_(fault) {}

Work::Due Operation::due() const {
  if (fault_ == nullptr || fails()) return Work::Due::kAnyTime;
  const bool hangs = fault_->action == FaultRule::Action::kHang;
  return hangs && fault_->time.count() == 0 ? Work::Due::kNever
                                            : Work::Due::kWhenWaitedFor;
}

void Operation::start() {
  begin_ = now_ns();
  if (fault_ == nullptr) return;
  const bool deferred = settings().schedule != Schedule::kOrdinary;
  const int64_t until =
      deferred ? begin_ : begin_ + std::chrono::nanoseconds(fault_->time).count();
  if (fault_->action == FaultRule::Action::kDelay) wait_until(until);
  if (fault_->action == FaultRule::Action::kHang) {
    if (fault_->time.count() == 0) wait_forever();
    wait_until(until);
    refuse(kFailure, fault_name(what_.kind), " timed out (fault ", fault_->text, ")");
  }
}

void Operation::finish() {
  const bool crosses = is_copy(what_.kind) && crossing_.bytes != 0;
  if (crosses && settings().costs.any()) {
    wait_until(end_of_copy(what_.kind, what_.device, stream_.has_value(),
                           crossing_.bytes, crossing_.descriptors, begin_));
  }
  if (traced(what_.kind)) {
    const Via via = !crosses ? Via::kHost : what_.hidden ? Via::kHidden : Via::kLink;
    write_trace({what_.kind, thread_, what_.bytes, what_.descriptors, what_.device,
                 stream_, begin_, now_ns(), via, fails()});
  }
  if (!fails()) return;
  if (fault_->action == FaultRule::Action::kOom) {
    refuse(kFailure, "out of device memory (fault ", fault_->text, ")");
  }
  refuse(kFailure, fault_name(what_.kind), " failed (fault ", fault_->text, ")");
}

void copy_now(char* dst, const char* src, uint64_t bytes) {
  std::memmove(dst, src, bytes);
}

uint64_t copy_on(Stream& stream, CopyJob job) {
  Operation operation({job.kind, stream.device(), job.bytes, 1},
                      static_cast<uint32_t>(stream.handle()));
  const Copied copied{job.dst, job.src, job.bytes};
  const bool poisons = operation.disturbed() && scheduler() == nullptr;
  Work work([job = std::move(job), operation, copied, poisons]() mutable {
    if (poisons) poison(copied);
    operation.start();
    copy_now(job.dst, job.src, operation.fails() ? job.bytes / 2 : job.bytes);
    operation.finish();
  });
  work.copied = copied;
  work.due = operation.due();
  return stream.submit(std::move(work));
}

}  // namespace rbln_sim
