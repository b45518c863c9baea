// SPDX-License-Identifier: Apache-2.0
#include "stream/operation.h"

#include <fstream>

#include "harness.h"
#include "stream/clock.h"

using namespace rbln_sim;

namespace {

// How many pieces `perform` asks for; -1 if the body is not run.
int pieces_of(uint64_t descriptors) {
  int pieces = -1;
  try {
    perform({Kind::kD2H, 0, 100, descriptors},
            [&](uint64_t asked) { pieces = static_cast<int>(asked); });
  } catch (const Refusal&) {
  }
  return pieces;
}

}  // namespace

TEST(an_operation_is_done_whole) {
  CHECK_EQ(pieces_of(5), 5);
  CHECK_EQ(pieces_of(0), 0);
}

TEST(one_that_fails_is_done_half) {
  setenv("RBLN_SIM_FAULTS", "fail:d2h:1+sticky", 1);
  CHECK_EQ(pieces_of(5), 2);
  CHECK_EQ(pieces_of(1), -1);
  CHECK_EQ(pieces_of(0), -1);
  CHECK_REFUSED("d2h failed (fault fail:d2h:1+sticky)",
                perform({Kind::kD2H, 0, 100, 1}, [](uint64_t) {}));
}

TEST(out_of_memory_says_so) {
  setenv("RBLN_SIM_FAULTS", "oom:alloc:1", 1);
  CHECK_REFUSED("out of device memory (fault oom:alloc:1)",
                perform({Kind::kAlloc, 0, 100}, [](uint64_t) {}));
}

TEST(a_delay_is_waited_for) {
  setenv("RBLN_SIM_FAULTS", "delay:sync:2:30ms", 1);
  const int64_t begin = now_ns();
  perform({Kind::kSync, 0}, [](uint64_t) {});
  perform({Kind::kSync, 0}, [](uint64_t) {});
  CHECK(now_ns() - begin >= 30'000'000);
}

TEST(a_hang_with_a_time_fails_after_it) {
  setenv("RBLN_SIM_FAULTS", "hang:sync:1:20ms", 1);
  const int64_t begin = now_ns();
  CHECK_REFUSED("sync timed out", perform({Kind::kSync, 0}, [](uint64_t) {}));
  CHECK(now_ns() - begin >= 20'000'000);
}

TEST(faults_take_no_time_in_deferred_mode) {
  setenv("RBLN_SIM_DEFERRED", "latest", 1);
  setenv("RBLN_SIM_FAULTS", "delay:sync:1:1000s,hang:sync:2:1000s", 1);
  perform({Kind::kSync, 0}, [](uint64_t) {});
  CHECK_REFUSED("sync timed out", perform({Kind::kSync, 0}, [](uint64_t) {}));
}

TEST(a_hang_ends_with_the_process) {
  const int status = harness::status_of_child([] {
    setenv("RBLN_SIM_FAULTS", "hang:sync:1", 1);
    alarm(1);
    perform({Kind::kSync, 0}, [](uint64_t) {});
  });
  CHECK(WIFSIGNALED(status) && WTERMSIG(status) == SIGALRM);
}

TEST(modelled_time_is_kept) {
  setenv("RBLN_SIM_PAGEABLE_GBPS", "1", 1);
  int64_t best = INT64_MAX;
  for (int i = 0; i < 20; ++i) {
    const int64_t begin = now_ns();
    perform({Kind::kD2H, 0, 2'000'000, 1}, [](uint64_t) {});
    best = std::min(best, now_ns() - begin);
    CHECK(best >= 2'000'000);
  }
  CHECK(best < 2'100'000);
}

TEST(only_copies_have_modelled_time) {
  setenv("RBLN_SIM_SUBMIT_US", "1000000", 1);
  const int64_t begin = now_ns();
  perform({Kind::kSync, 0}, [](uint64_t) {});
  perform({Kind::kAlloc, 0, 1 << 30}, [](uint64_t) {});
  CHECK(now_ns() - begin < 1'000'000'000);
}

TEST(an_operation_is_traced_with_its_times) {
  const std::string path = std::string(getenv("RBLN_SIM_STATE_DIR")) + ".trace";
  setenv("RBLN_SIM_TRACE", path.c_str(), 1);
  const int64_t before = now_ns();
  perform({Kind::kD2D, 1, 100, 3}, [](uint64_t) { wait_until(now_ns() + 1'000'000); });
  const int64_t after = now_ns();
  std::ifstream file(path);
  std::string line;
  std::getline(file, line);
  CHECK(line.find("\"kind\": \"d2d\", \"bytes\": 100, \"descriptors\": 3, "
                  "\"device\": 1, \"stream\": null") != std::string::npos);
  const int64_t begin = std::stoll(line.substr(line.find("begin\": ") + 8));
  const int64_t end = std::stoll(line.substr(line.find("end\": ") + 6));
  CHECK(before <= begin && begin + 1'000'000 <= end && end <= after);
}

TEST(what_does_not_cross_has_no_modelled_time) {
  setenv("RBLN_SIM_SUBMIT_US", "1000000", 1);
  const int64_t begin = now_ns();
  perform({Kind::kH2D, 0, 100, 1}, [](uint64_t) { return Operation::Crossing{}; });
  perform_hidden(Kind::kH2D, 0, 100, [] { return Operation::Crossing{}; });
  CHECK(now_ns() - begin < 1'000'000'000);
}

TEST(only_what_crosses_has_modelled_time) {
  setenv("RBLN_SIM_DESCRIPTOR_US", "20000", 1);
  int64_t begin = now_ns();
  perform({Kind::kH2D, 0, 100, 50}, [](uint64_t) { return Operation::Crossing{2, 1}; });
  CHECK(now_ns() - begin >= 20'000'000);
  CHECK(now_ns() - begin < 1'000'000'000);
  begin = now_ns();
  perform_hidden(Kind::kH2D, 0, 100, [] { return Operation::Crossing{100, 1}; });
  CHECK(now_ns() - begin >= 20'000'000);
}

TEST(a_hidden_copy_is_neither_counted_nor_struck) {
  setenv("RBLN_SIM_FAULTS", "fail:h2d:2,fail:any:3", 1);
  const auto copy = [](uint64_t) {};
  perform({Kind::kH2D, 0, 100, 1}, copy);
  for (int i = 0; i < 3; ++i) {
    perform_hidden(Kind::kH2D, 0, 100, [] { return Operation::Crossing{100, 1}; });
  }
  CHECK_REFUSED("h2d failed (fault fail:h2d:2)", perform({Kind::kH2D, 0, 1, 1}, copy));
}

HARNESS_MAIN()
