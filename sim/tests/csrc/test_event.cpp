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
