// SPDX-License-Identifier: Apache-2.0
#include "stream/stream.h"

#include <pthread.h>
#include <signal.h>

#include <future>
#include <thread>

#include "device/device.h"
#include "harness.h"

using namespace rbln_sim;

namespace {

/// Work that lasts until it is let go.
class Gate {
 public:
  std::function<void()> work() {
    return [this] { opened_.get_future().wait(); };
  }
  void open() { opened_.set_value(); }

 private:
  std::promise<void> opened_;
};

}  // namespace

TEST(draining_a_device_leaves_the_others) {
  const auto other = create_stream(1);
  Gate gate;
  const uint64_t held = other->submit(gate.work());
  const uint64_t ticket = create_stream(0)->submit([] {});
  drain_device(0);
  CHECK_EQ(ticket, 1u);
  CHECK(!other->done(held));
  gate.open();
  drain_device(1);
}

TEST(work_runs_with_signals_blocked) {
  const auto stream = create_stream(0);
  sigset_t mask;
  stream->wait(
      stream->submit([&mask] { pthread_sigmask(SIG_SETMASK, nullptr, &mask); }));
  CHECK_EQ(sigismember(&mask, SIGINT), 1);
  pthread_sigmask(SIG_SETMASK, nullptr, &mask);
  CHECK_EQ(sigismember(&mask, SIGINT), 0);
}

TEST(a_failure_is_told_to_every_wait_for_what_was_queued_before_the_first) {
  const auto stream = create_stream(0);
  stream->submit([] {});
  const uint64_t bad = stream->submit([] { throw std::runtime_error("broken"); });
  bool ran = false;
  const uint64_t behind = stream->submit([&ran] { ran = true; });
  stream->wait(bad - 1);
  while (!stream->done(behind)) std::this_thread::yield();
  CHECK(ran);
  CHECK(stream->failed(behind) && !stream->failed(bad - 1));
  for (const uint64_t ticket : {behind, bad}) {
    CHECK_REFUSED("failed: broken", stream->wait(ticket));
  }
  const uint64_t later = stream->submit([] {});
  stream->wait(later);
  CHECK(!stream->failed(later));
  CHECK_REFUSED("failed: broken", stream->tell_failure(behind));
}

TEST(draining_tells_a_failure_after_all_streams_were_waited_for) {
  const auto bad = create_stream(0), good = create_stream(0);
  bad->submit([] { throw std::runtime_error("broken"); });
  Gate gate;
  const uint64_t ticket = good->submit(gate.work());
  std::thread opener([&gate] { gate.open(); });
  CHECK_REFUSED("failed: broken", drain_device(0));
  CHECK(good->done(ticket));
  opener.join();
  drain_device(1);
}

HARNESS_MAIN()
