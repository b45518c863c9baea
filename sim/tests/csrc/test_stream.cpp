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

TEST(work_runs_in_order) {
  const auto stream = create_stream(0);
  std::vector<int> order;
  for (int i = 0; i < 1000; ++i) stream->submit([&order, i] { order.push_back(i); });
  stream->wait(stream->newest());
  for (int i = 0; i < 1000; ++i) CHECK_EQ(order[i], i);
}

TEST(work_is_not_done_while_it_runs) {
  const auto stream = create_stream(0);
  Gate gate;
  CHECK(stream->done(stream->newest()));
  const uint64_t ticket = stream->submit(gate.work());
  const uint64_t later = stream->submit([] {});
  CHECK(!stream->done(ticket));
  gate.open();
  stream->wait(ticket);
  CHECK(stream->done(ticket));
  stream->wait(later);
  CHECK_EQ(later, stream->newest());
}

TEST(what_work_kept_alive_is_released_before_it_is_done) {
  const auto stream = create_stream(0);
  auto kept = std::make_shared<int>(1);
  const std::weak_ptr<int> watched = kept;
  const uint64_t ticket = stream->submit([kept = std::move(kept)] {});
  stream->wait(ticket);
  CHECK(watched.expired());
}

TEST(streams_do_not_wait_for_each_other) {
  const auto blocked = create_stream(0), free = create_stream(0);
  Gate gate;
  const uint64_t held = blocked->submit(gate.work());
  free->wait(free->submit([] {}));
  CHECK(!blocked->done(held));
  gate.open();
  blocked->wait(held);
}

TEST(handles_hold_device_and_number) {
  CHECK_EQ(create_stream(1)->handle(), (1ull << 32) + 1);
  CHECK_EQ(create_stream(1)->handle(), (1ull << 32) + 2);
  CHECK_EQ(create_stream(0)->handle(), 1u);
  CHECK_EQ(find_stream(1ull << 32)->device(), 1u);
  CHECK_EQ(find_stream((1ull << 32) + 2)->handle(), (1ull << 32) + 2);
}

TEST(unknown_handles_are_refused) {
  CHECK_REFUSED("is not a stream", find_stream(7));
  CHECK_REFUSED("there is no device rbln:2", find_stream(2ull << 32));
  CHECK_REFUSED("there is no device rbln:2", create_stream(2));
  CHECK_REFUSED("is of rbln:1, not of rbln:0", set_current_stream(0, 1ull << 32));
}

TEST(the_current_stream_is_per_thread_and_device) {
  const auto stream = create_stream(0);
  set_current_stream(0, stream->handle());
  CHECK_EQ(current_stream(0), stream);
  CHECK_EQ(current_stream(1)->handle(), 1ull << 32);
  std::thread([] { CHECK_EQ(current_stream(0)->handle(), 0u); }).join();
  set_current_stream(0, 0);
  CHECK_EQ(current_stream(0)->handle(), 0u);
}

TEST(draining_waits_for_the_current_stream_only) {
  const auto current = create_stream(0), other = create_stream(0);
  Gate gate;
  const uint64_t held = other->submit(gate.work());
  set_current_stream(0, current->handle());
  const uint64_t ticket = current->submit([] {});
  drain_current_stream(0);
  CHECK(current->done(ticket));
  CHECK(!other->done(held));
  gate.open();
  drain_device(0);
  CHECK(other->done(held));
}

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

TEST(many_threads_submit_to_one_stream) {
  const auto stream = create_stream(0);
  int sum = 0;
  std::vector<std::thread> threads;
  for (int t = 0; t < 4; ++t) {
    threads.emplace_back([&] {
      for (int i = 0; i < 500; ++i) stream->submit([&sum] { ++sum; });
      stream->wait(stream->newest());
    });
  }
  for (std::thread& thread : threads) thread.join();
  CHECK_EQ(sum, 2000);
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
