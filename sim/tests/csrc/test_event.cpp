// SPDX-License-Identifier: Apache-2.0
#include "stream/event.h"

#include <atomic>
#include <future>
#include <thread>

#include "harness.h"

using namespace rbln_sim;

namespace {

struct Blocked {
  std::shared_ptr<Stream> stream;
  std::promise<void> gate;
  uint64_t ticket;

  explicit Blocked(uint32_t device) : stream(create_stream(device)) {
    ticket = stream->submit([this] { gate.get_future().wait(); });
  }
};

}  // namespace

TEST(an_event_never_recorded_is_done) {
  const auto event = find_event(create_event(0));
  CHECK(event->done());
  event->synchronize();
  const auto stream = create_stream(0);
  event->hold(*stream);
  CHECK_EQ(stream->newest(), 0u);
}

TEST(an_event_is_done_with_the_work_before_it) {
  Blocked blocked(0);
  const auto event = find_event(create_event(0));
  event->record(blocked.stream);
  CHECK(!event->done());
  blocked.gate.set_value();
  event->synchronize();
  CHECK(event->done());
}

TEST(work_after_the_mark_does_not_matter) {
  const auto event = find_event(create_event(0));
  Blocked blocked(0);
  const auto other = create_stream(0);
  other->submit([] {});
  event->record(other);
  blocked.stream->submit([] {});
  event->synchronize();
  blocked.gate.set_value();
  blocked.stream->wait(blocked.stream->newest());
}

TEST(a_stream_waits_for_an_event_of_another_stream_or_device) {
  for (const uint32_t device : {0u, 1u}) {
    Blocked blocked(0);
    const auto event = find_event(create_event(0));
    event->record(blocked.stream);
    const auto waiting = create_stream(device);
    event->hold(*waiting);
    const uint64_t after = waiting->submit([] {});
    CHECK(!waiting->done(after));
    blocked.gate.set_value();
    waiting->wait(after);
    CHECK(event->done());
  }
}

TEST(a_wait_keeps_to_the_mark_it_saw) {
  Blocked first(0), second(0);
  const auto event = find_event(create_event(0));
  event->record(first.stream);
  const auto waiting = create_stream(0);
  event->hold(*waiting);
  event->record(second.stream);
  first.gate.set_value();
  waiting->wait(waiting->newest());
  CHECK(!event->done());
  second.gate.set_value();
  event->synchronize();
}

TEST(a_stream_does_not_wait_for_itself) {
  Blocked blocked(0);
  const auto event = find_event(create_event(0));
  event->record(blocked.stream);
  event->hold(*blocked.stream);
  CHECK_EQ(blocked.stream->newest(), blocked.ticket);
  blocked.gate.set_value();
  event->synchronize();
}

TEST(destroying_an_event_leaves_waits_unharmed) {
  Blocked blocked(0);
  const uint64_t handle = create_event(0);
  find_event(handle)->record(blocked.stream);
  const auto waiting = create_stream(0);
  find_event(handle)->hold(*waiting);
  const uint64_t after = waiting->submit([] {});
  destroy_event(handle);
  CHECK(!waiting->done(after));
  CHECK_REFUSED("is not an event", find_event(handle));
  CHECK_REFUSED("is not an event", destroy_event(handle));
  blocked.gate.set_value();
  waiting->wait(after);
}

TEST(handles_hold_the_device_and_are_never_zero) {
  const uint64_t handle = create_event(1);
  CHECK_EQ(handle >> 32, 1u);
  CHECK(static_cast<uint32_t>(handle) != 0);
  CHECK_EQ(find_event(handle)->device(), 1u);
  CHECK(create_event(0) != 0);
}

TEST(what_does_not_fit_is_refused) {
  CHECK_REFUSED("the event is of rbln:0, the stream of rbln:1",
                find_event(create_event(0))->record(create_stream(1)));
  CHECK_REFUSED("is not an event", find_event(12345));
  CHECK_REFUSED("there is no device", create_event(2));
}

TEST(threads_may_share_and_reuse_an_event) {
  std::vector<std::shared_ptr<Stream>> all;
  for (int i = 0; i < 4; ++i) all.push_back(create_stream(0));
  const uint64_t shared = create_event(0);
  std::atomic<int> ran{0};
  std::vector<std::thread> threads;
  for (int t = 0; t < 4; ++t) {
    threads.emplace_back([&, t] {
      for (int i = 0; i < 200; ++i) {
        const auto& stream = all[t];
        const uint64_t own = create_event(0);
        stream->submit([&ran] { ++ran; });
        find_event(own)->record(stream);
        find_event(shared)->record(stream);
        find_event(own)->hold(*all[(t + 1) % 4]);
        find_event(shared)->hold(*all[(t + 2) % 4]);
        if (i % 2 == 0) find_event(shared)->synchronize();
        find_event(shared)->done();
        destroy_event(own);
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  for (const auto& stream : all) stream->wait(stream->newest());
  CHECK_EQ(ran.load(), 800);
}

HARNESS_MAIN()
