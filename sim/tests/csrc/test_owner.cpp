// SPDX-License-Identifier: Apache-2.0
#include "device/owner.h"

#include <signal.h>
#include <sys/syscall.h>

#include <fstream>
#include <thread>

#include "harness.h"

using namespace rbln_sim;

namespace {

/// A process that has opened `npus`, until it is killed.
class Holder {
 public:
  explicit Holder(const std::vector<unsigned>& npus) {
    int ready[2];
    CHECK_EQ(pipe(ready), 0);
    pid_ = fork();
    if (pid_ == 0) {
      open_npus(npus);
      (void)!write(ready[1], "x", 1);
      for (;;) pause();
    }
    char byte;
    CHECK_EQ(read(ready[0], &byte, 1), 1);
    close(ready[0]);
    close(ready[1]);
  }
  ~Holder() {
    kill(pid_, SIGKILL);
    waitpid(pid_, nullptr, 0);
  }

  pid_t pid() const { return pid_; }

 private:
  pid_t pid_ = 0;
};

std::string contents(const std::string& path) {
  std::ifstream file(path);
  std::stringstream text;
  text << file.rdbuf();
  return text.str();
}

}  // namespace

TEST(a_held_npu_is_refused_with_its_holder) {
  const Holder holder({0});
  const std::string message = harness::refusal_of([] { open_npus({0}); });
  CHECK(message.find("NPU 0 is held by pid " + std::to_string(holder.pid()) + " (") !=
        std::string::npos);
  CHECK(message.find("test_owner") != std::string::npos);
}

TEST(all_npus_or_none) {
  {
    const Holder holder({1});
    CHECK_REFUSED("NPU 1 is held", open_npus({0, 1}));
    const Holder other({0});  // 0 was given back
  }
  open_npus({0, 1});
}

TEST(opening_again_is_no_second_open) {
  const std::string log = std::string(getenv("RBLN_SIM_STATE_DIR")) + ".log";
  setenv("RBLN_SIM_OPEN_LOG", log.c_str(), 1);
  open_npus({0});
  open_npus({0});
  open_npus({0, 1});
  std::istringstream lines(contents(log));
  std::string line;
  for (int npu = 0; npu < 2; ++npu) {
    CHECK(std::getline(lines, line));
    const std::string begin = "{\"pid\": " + std::to_string(getpid()) +
                              ", \"npu\": " + std::to_string(npu) + ", \"time\": ";
    CHECK_EQ(line.substr(0, begin.size()), begin);
    CHECK(line.find("\"argv\": \"") != std::string::npos);
  }
  CHECK(!std::getline(lines, line));
}

TEST(an_unwritable_log_is_refused_by_name_and_opens_nothing) {
  setenv("RBLN_SIM_OPEN_LOG", "/nonexistent/log", 1);
  CHECK_REFUSED("RBLN_SIM_OPEN_LOG", open_npus({0}));
  const Holder holder({});
  CHECK_EQ(harness::status_of_child([] { setenv("RBLN_SIM_OPEN_LOG", "", 1); }), 0);
}

TEST(a_child_that_outlives_the_owner_holds_nothing) {
  int child_pid[2];
  CHECK_EQ(pipe(child_pid), 0);
  CHECK_EQ(harness::status_of_child([&] {
             open_npus({0});
             if (fork() == 0) {
               const pid_t own = getpid();
               (void)!write(child_pid[1], &own, sizeof own);
               for (;;) pause();
             }
           }),
           0);
  pid_t child;
  CHECK_EQ(read(child_pid[0], &child, sizeof child), ssize_t{sizeof child});
  open_npus({0});
  kill(child, SIGKILL);
}

TEST(a_state_folder_of_someone_else_is_refused) {
  const std::string state = getenv("RBLN_SIM_STATE_DIR");
  std::filesystem::create_directory(state + ".real");
  std::filesystem::create_directory_symlink(state + ".real", state);
  CHECK_REFUSED("is not a folder of this user", open_npus({0}));
}

TEST(a_state_folder_that_cannot_be_made_is_refused) {
  setenv("RBLN_SIM_STATE_DIR", "/nonexistent/folder/deep", 1);
  CHECK_REFUSED("cannot make the folder /nonexistent/folder/deep", open_npus({0}));
}

TEST(a_lock_file_that_cannot_be_opened_is_refused) {
  const std::string state = getenv("RBLN_SIM_STATE_DIR");
  std::filesystem::create_directories(state + "/npu1.lock");
  CHECK_REFUSED("cannot open " + state + "/npu1.lock", open_npus({0, 1}));
  CHECK_REFUSED("RBLN_SIM_STATE_DIR names another folder", open_npus({1}));
  const Holder holder({0});  // 0 was given back
}

TEST(a_fork_during_the_first_open_neither_hangs_nor_holds) {
  for (int round = 0; round < 50; ++round) {
    CHECK_EQ(harness::status_of_child([] {
               alarm(200);
               const auto open_or_refuse = [] {
                 try {
                   refuse_forked();
                   open_npus({0});
                 } catch (const Refusal&) {
                 }
               };
               std::thread opener(open_or_refuse);
               const pid_t child = fork();
               if (child == 0) {
                 alarm(200);
                 open_or_refuse();
                 // Past ThreadSanitizer, which misses the opener in this process.
                 syscall(SYS_exit_group, 0);
               }
               int status = -1;
               waitpid(child, &status, 0);
               opener.join();
               CHECK_EQ(status, 0);
             }),
             0);
  }
  open_npus({0});
}

HARNESS_MAIN()
