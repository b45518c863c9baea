// SPDX-License-Identifier: Apache-2.0
#include "stream/scheduler.h"

#include <csignal>
#include <fstream>
#include <set>
#include <thread>

#include "harness.h"
#include "stream/event.h"
#include "stream/operation.h"

using namespace rbln_sim;

namespace {

void defer(const std::string& schedule) {
  setenv("RBLN_SIM_DEFERRED", schedule.c_str(), 1);
}

/// What ran, by name, in order; how work is queued that tells of itself.
struct Log {
  std::string ran;

  Work work(char name) {
    return Work([this, name] { ran += name; });
  }
};

Work due(Work work, Work::Due when) {
  work.due = when;
  return work;
}

// Nothing waits meanwhile: what the schedule alone does in some calls.
std::string runs_of(const std::string& seed) {
  static auto* log = new Log();
  const int status = harness::status_of_child([&] {
    defer(seed);
    const auto one = create_stream(0), other = create_stream(0);
    for (char name = 'a'; name <= 'h'; ++name) {
      one->submit(log->work(name));
      other->submit(log->work(static_cast<char>(name - 'a' + 'A')));
      log->ran += '.';
    }
    drain_device(0);
    std::ofstream(getenv("RBLN_SIM_STATE_DIR") + std::string("/ran")) << log->ran;
  });
  CHECK_EQ(status, 0);
  std::string ran;
  std::ifstream(getenv("RBLN_SIM_STATE_DIR") + std::string("/ran")) >> ran;
  return ran;
}

}  // namespace

TEST(the_latest_work_runs_when_it_is_waited_for_and_not_what_is_behind_it) {
  defer("latest");
  const auto stream = create_stream(0), other = create_stream(0);
  Log log;
  other->submit(log.work('x'));
  stream->submit(log.work('a'));
  const uint64_t ticket = stream->submit(log.work('b'));
  stream->submit(log.work('c'));
  CHECK_EQ(log.ran, "");
  stream->wait(ticket);
  CHECK_EQ(log.ran, "ab");
  CHECK(!stream->done(ticket + 1));
}

TEST(the_latest_work_runs_for_an_edge_that_is_waited_for) {
  defer("latest");
  const auto first = create_stream(0), second = create_stream(1);
  const auto event = find_event(create_event(0));
  Log log;
  first->submit(log.work('a'));
  event->record(first);
  first->submit(log.work('b'));
  event->hold(*second);
  const uint64_t ticket = second->submit(log.work('c'));
  CHECK_EQ(log.ran, "");
  second->wait(ticket);
  CHECK_EQ(log.ran, "ac");
}

TEST(edges_to_and_fro_are_kept_however_many) {
  defer("latest");
  const std::shared_ptr<Stream> streams[] = {create_stream(0), create_stream(0)};
  Log log;
  std::string wanted;
  for (int i = 0; i < 1000; ++i) {
    const auto event = find_event(create_event(0));
    streams[i % 2]->submit(log.work(static_cast<char>('a' + i % 26)));
    wanted += static_cast<char>('a' + i % 26);
    event->record(streams[i % 2]);
    event->hold(*streams[1 - i % 2]);
  }
  streams[0]->wait(streams[0]->newest());
  CHECK_EQ(log.ran, wanted);
}

TEST(of_streams_without_an_edge_the_latest_runs_first_what_was_queued_last) {
  defer("latest");
  const auto one = create_stream(0), other = create_stream(0);
  Log log;
  one->submit(log.work('a'));
  other->submit(log.work('b'));
  one->submit(log.work('c'));
  drain_device(0);
  CHECK_EQ(log.ran, "bac");
}

TEST(a_loop_that_asks_ends) {
  for (const char* schedule : {"latest", "7"}) {
    const int status = harness::status_of_child([schedule] {
      defer(schedule);
      const auto stream = create_stream(0);
      Log log;
      const uint64_t ticket = stream->submit(log.work('a'));
      for (int i = 0; i < 100; ++i) stream->submit(log.work('b'));
      int asked = 1;
      while (!stream->query(ticket)) ++asked;
      CHECK(asked <= 3);
      if (schedule == std::string("latest")) CHECK_EQ(log.ran, "a");
      while (!stream->query(stream->newest())) ++asked;
      CHECK(asked <= 6);
    });
    CHECK_EQ(status, 0);
  }
}

TEST(the_earliest_work_has_run_on_return) {
  defer("earliest");
  const auto first = create_stream(0), second = create_stream(0);
  Log log;
  first->submit(log.work('a'));
  CHECK_EQ(log.ran, "a");
  CHECK(first->query(first->newest()));
  first->submit(due(log.work('b'), Work::Due::kWhenWaitedFor));
  first->submit(log.work('c'));
  const auto event = find_event(create_event(0));
  event->record(first);
  event->hold(*second);
  second->submit(log.work('d'));
  CHECK_EQ(log.ran, "a");
  second->wait(second->newest());
  CHECK_EQ(log.ran, "abcd");
}

TEST(a_seed_is_a_schedule_and_seeds_differ) {
  std::filesystem::create_directories(getenv("RBLN_SIM_STATE_DIR"));
  std::set<std::string> all;
  bool early = false, late = false;
  for (int seed = 1; seed <= 20; ++seed) {
    const std::string ran = runs_of(std::to_string(seed));
    CHECK_EQ(ran, runs_of(std::to_string(seed)));
    all.insert(ran);
    early |= ran.find('a') < ran.find('.');
    late |= ran.find('h') > ran.rfind('.') && ran.find('H') > ran.rfind('.');
  }
  CHECK(all.size() >= 19 && early && late);
}

TEST(a_destination_holds_poison_from_the_submission_on) {
  defer("latest");
  const auto stream = create_stream(0);
  std::string src = "source", dst = "target", other = "......";
  stream->submit([] {});
  const uint64_t ticket =
      copy_on(*stream, {Kind::kD2H, dst.data(), src.data(), 6, nullptr, nullptr});
  const std::string poison(6, static_cast<char>(kPoison));
  CHECK_EQ(dst, poison);
  src = "reused";  // too early: it is read when the copy runs
  stream->wait(ticket);
  CHECK_EQ(dst, "reused");
}

TEST(poison_spares_what_earlier_work_needs) {
  defer("latest");
  const auto first = create_stream(0), second = create_stream(0);
  const auto event = find_event(create_event(0));
  std::string a = "aaaaaa", b = "bbbbbb", c = "cccccc";
  const auto copy = [](Stream& stream, std::string& dst, std::string& src) {
    return copy_on(stream, {Kind::kD2D, dst.data(), src.data(), 6, nullptr, nullptr});
  };
  copy(*first, a, b);
  event->record(first);
  event->hold(*second);
  const uint64_t ticket = copy(*second, b, c);
  copy(*second, c, a);
  CHECK_EQ(b + c, "bbbbbbcccccc");
  second->wait(ticket - 1);  // the edge: now nothing needs b
  CHECK_EQ(a, "bbbbbb");
  CHECK_EQ(b, std::string(6, static_cast<char>(kPoison)));
  second->wait(second->newest());
  CHECK_EQ(b + c, "ccccccbbbbbb");
}

TEST(work_that_never_runs_blocks_its_own_stream_and_no_other) {
  for (const char* schedule : {"latest", "earliest", "3"}) {
    const int status = harness::status_of_child([schedule] {
      defer(schedule);
      const auto hung = create_stream(0), behind = create_stream(0),
                 free = create_stream(0);
      const auto event = find_event(create_event(0));
      static Log log;
      hung->submit(due(log.work('a'), Work::Due::kNever));
      event->record(hung);
      event->hold(*behind);
      behind->submit(log.work('b'));
      free->wait(free->submit(log.work('c')));
      for (int i = 0; i < 10; ++i) CHECK(!hung->query(1) && !behind->query(2));
      CHECK_EQ(log.ran, "c");
      const uint64_t ticket = free->submit(log.work('d'));
      std::thread([free, ticket] {
        while (!free->done(ticket)) std::this_thread::yield();
        kill(getpid(), SIGTERM);
      }).detach();
      drain_device(0);
    });
    CHECK(WIFSIGNALED(status) && WTERMSIG(status) == SIGTERM);
  }
}

TEST(threads_share_the_schedule) {
  for (const char* schedule : {"latest", "earliest", "5"}) {
    const int status = harness::status_of_child([schedule] {
      defer(schedule);
      const std::shared_ptr<Stream> streams[] = {create_stream(0), create_stream(1)};
      int sum = 0;  // the scheduler's lock guards it
      std::vector<std::thread> threads;
      for (int t = 0; t < 4; ++t) {
        threads.emplace_back([&, t] {
          for (int i = 0; i < 300; ++i) {
            Stream& stream = *streams[(t + i) % 2];
            const uint64_t ticket = stream.submit([&sum] { ++sum; });
            const auto event = find_event(create_event((t + i) % 2));
            event->record(streams[(t + i) % 2]);
            event->hold(*streams[(t + i + 1) % 2]);
            if (i % 3 == 0) stream.wait(ticket);
            if (i % 3 == 1) stream.query(ticket);
          }
          for (const auto& stream : streams) stream->wait(stream->newest());
        });
      }
      for (std::thread& thread : threads) thread.join();
      CHECK_EQ(sum, 1200);
    });
    CHECK_EQ(status, 0);
  }
}

HARNESS_MAIN()
