// SPDX-License-Identifier: Apache-2.0
//
// A test program: TEST(name) { ... } per test, HARNESS_MAIN() at the end. Every test
// runs in a process of its own, so that it has the whole library to itself, with two
// NPUs of 1 GiB and a state folder of its own.
#pragma once

#include <fcntl.h>
#include <stdlib.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstdio>
#include <cstring>
#include <filesystem>
#include <functional>
#include <initializer_list>
#include <iostream>
#include <sstream>
#include <stdexcept>
#include <string>
#include <vector>

#include "refusal.h"

namespace harness {

struct Test {
  std::string name;
  void (*body)();
  /// RBLN_SIM_DEFERRED of its process.
  const char* deferred = "0";
};

inline std::vector<Test>& tests() {
  static std::vector<Test> all;
  return all;
}

struct Registered {
  Registered(const char* name, void (*body)()) { tests().push_back({name, body}); }
  Registered(const char* name, void (*body)(),
             std::initializer_list<const char*> modes) {
    for (const char* deferred : modes) {
      tests().push_back({name + std::string(" deferred=") + deferred, body, deferred});
    }
  }
};

struct Failure : std::runtime_error {
  using std::runtime_error::runtime_error;
};

[[noreturn]] inline void fail(const char* file, int line, const std::string& what) {
  throw Failure(std::string(file) + ":" + std::to_string(line) + ": " + what);
}

template <typename A, typename B>
void check_equal(const char* file, int line, const char* text, const A& got,
                 const B& want) {
  if (got == want) return;
  std::ostringstream message;
  message << text << ": got " << got << ", want " << want;
  fail(file, line, message.str());
}

/// The message of the Refusal that `body` throws.
inline std::string refusal_of(const std::function<void()>& body) {
  try {
    body();
  } catch (const rbln_sim::Refusal& refusal) {
    return refusal.what();
  }
  throw Failure("nothing was refused");
}

/// What `body` writes to stderr.
inline std::string stderr_of(const std::function<void()>& body) {
  FILE* file = tmpfile();
  const int saved = dup(STDERR_FILENO);
  dup2(fileno(file), STDERR_FILENO);
  body();
  dup2(saved, STDERR_FILENO);
  close(saved);
  std::string text(4096, '\0');
  rewind(file);
  text.resize(fread(text.data(), 1, text.size(), file));
  fclose(file);
  return text;
}

/// Run `body` in a forked process; its wait status.
inline int status_of_child(const std::function<void()>& body) {
  std::cout.flush();
  const pid_t child = fork();
  if (child == 0) {
    try {
      body();
    } catch (const std::exception& error) {
      std::cerr << error.what() << std::endl;
      _exit(1);
    }
    exit(0);
  }
  int status = -1;
  waitpid(child, &status, 0);
  return status;
}

inline int run_all() {
  char pattern[] = "/tmp/rbln-sim-test-XXXXXX";
  if (mkdtemp(pattern) == nullptr) {
    std::perror("mkdtemp");
    return 1;
  }
  const std::filesystem::path root = pattern;
  int failed = 0;
  for (const Test& test : tests()) {
    const std::filesystem::path folder = root / test.name;
    const int status = status_of_child([&] {
      for (const char* name : {"RBLN_DEVICES", "RBLN_VISIBLE_DEVICES"}) unsetenv(name);
      setenv("RBLN_SIM_DEVICES", "2", 1);
      setenv("RBLN_SIM_MEMORY_GIB", "1", 1);
      setenv("RBLN_SIM_DEFERRED", test.deferred, 1);
      setenv("RBLN_SIM_STATE_DIR", folder.c_str(), 1);
      test.body();
    });
    std::cout << (status == 0 ? "  ok      " : "  FAILED  ") << test.name;
    if (WIFSIGNALED(status)) std::cout << " (" << strsignal(WTERMSIG(status)) << ')';
    std::cout << std::endl;
    failed += status != 0;
  }
  std::filesystem::remove_all(root);
  return failed == 0 ? 0 : 1;
}

}  // namespace harness

#define TEST(name)                                                 \
  static void name();                                              \
  static const harness::Registered registered_##name(#name, name); \
  static void name()
/// A test that holds in ordinary and in deferred mode, whatever the schedule.
#define TEST_IN_EVERY_MODE(name)                                \
  static void name();                                           \
  static const harness::Registered registered_##name(           \
      #name, name, {"0", "latest", "earliest", "1", "2", "3"}); \
  static void name()
#define CHECK(condition) \
  if (!(condition)) harness::fail(__FILE__, __LINE__, "not true: " #condition)
#define CHECK_EQ(got, want) \
  harness::check_equal(__FILE__, __LINE__, #got, (got), (want))
/// `body` throws a Refusal whose message holds `text`.
#define CHECK_REFUSED(text, ...)                                                 \
  do {                                                                           \
    const std::string message_ = harness::refusal_of([&] { __VA_ARGS__; });      \
    if (message_.find(text) == std::string::npos)                                \
      harness::fail(__FILE__, __LINE__,                                          \
                    "message without '" + std::string(text) + "': " + message_); \
  } while (false)
/// The call returns `code` and its line on stderr holds `text`.
#define CHECK_FAILS(code, text, ...)                                         \
  do {                                                                       \
    const std::string line_ =                                                \
        harness::stderr_of([&] { CHECK_EQ((__VA_ARGS__), code); });          \
    if (line_.find(text) == std::string::npos)                               \
      harness::fail(__FILE__, __LINE__,                                      \
                    "stderr without '" + std::string(text) + "': " + line_); \
  } while (false)
#define HARNESS_MAIN() \
  int main() { return harness::run_all(); }
