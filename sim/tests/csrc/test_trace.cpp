// SPDX-License-Identifier: Apache-2.0
#include "stream/trace.h"

#include <fstream>
#include <thread>

#include "harness.h"

using namespace rbln_sim;

namespace {

std::string trace_path() {
  std::string path = getenv("RBLN_SIM_STATE_DIR");
  path += ".trace";
  setenv("RBLN_SIM_TRACE", path.c_str(), 1);
  return path;
}

std::vector<std::string> lines_of(const std::string& path) {
  std::ifstream file(path);
  std::vector<std::string> lines;
  for (std::string line; std::getline(file, line);) lines.push_back(line);
  return lines;
}

}  // namespace

TEST(nothing_is_traced_by_default) { CHECK(!traced(Kind::kD2H)); }

TEST(allocations_are_not_traced) {
  trace_path();
  CHECK(!traced(Kind::kAlloc));
  CHECK(traced(Kind::kSync));
}

TEST(a_line_is_an_object) {
  const std::string path = trace_path();
  write_trace({Kind::kD2H, 71, 4096, 1, 0, 2, 1200, 1950});
  write_trace({Kind::kSync, 72, 0, 0, 1, std::nullopt, 3, 4});
  write_trace({Kind::kH2D, 72, 1, 1, 0, std::nullopt, 5, 6, Via::kHost});
  write_trace({Kind::kH2D, 72, 1, 1, 0, std::nullopt, 5, 6, Via::kHidden});
  const auto lines = lines_of(path);
  const std::string pid = std::to_string(getpid());
  CHECK_EQ(lines.size(), 4u);
  CHECK_EQ(lines[0], "{\"pid\": " + pid +
                         ", \"thread\": 71, \"kind\": \"d2h\", \"bytes\": 4096, "
                         "\"descriptors\": 1, \"device\": 0, \"stream\": 2, "
                         "\"via\": \"link\", \"begin\": 1200, \"end\": 1950, "
                         "\"failed\": false}");
  CHECK_EQ(lines[1], "{\"pid\": " + pid +
                         ", \"thread\": 72, \"kind\": \"wait\", \"bytes\": 0, "
                         "\"descriptors\": 0, \"device\": 1, \"stream\": null, "
                         "\"via\": null, \"begin\": 3, \"end\": 4, "
                         "\"failed\": false}");
  CHECK(lines[2].find("\"via\": \"host\", \"begin\": 5") != std::string::npos);
  CHECK(lines[3].find("\"via\": \"hidden\", \"begin\": 5") != std::string::npos);
}

TEST(lines_of_threads_and_processes_do_not_mix) {
  const std::string path = trace_path();
  const auto write_many = [] {
    for (int i = 0; i < 200; ++i) write_trace({Kind::kH2D, i, 1, 1, 0, 1, 2, 3});
  };
  write_many();
  // Forked before there is a second thread, and at work at the same time.
  const pid_t child = fork();
  if (child == 0) {
    write_many();
    _exit(0);
  }
  std::thread other(write_many);
  other.join();
  int status = -1;
  waitpid(child, &status, 0);
  CHECK_EQ(status, 0);
  const auto lines = lines_of(path);
  CHECK_EQ(lines.size(), 600u);
  for (const std::string& line : lines) {
    CHECK_EQ(line.rfind("{\"pid\": ", 0), 0u);
    CHECK_EQ(line.back(), '}');
    CHECK_EQ(line.find('{', 1), std::string::npos);
  }
}

TEST(threads_have_numbers) {
  CHECK_EQ(thread_number(), static_cast<int>(getpid()));
  std::thread([] { CHECK(thread_number() != static_cast<int>(getpid())); }).join();
}

HARNESS_MAIN()
