// SPDX-License-Identifier: Apache-2.0
#include "device/owner.h"

#include <fcntl.h>
#include <pthread.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <cstring>
#include <map>
#include <mutex>
#include <string>

#include "refusal.h"
#include "settings.h"

namespace rbln_sim {
namespace {

std::mutex mutex;
std::map<unsigned, int>& held() {
  static auto* files = new std::map<unsigned, int>();
  return *files;
}
// Process id of the owner that this process was forked from; 0: not forked.
std::atomic<pid_t> forked_from{0};
std::atomic<pid_t> owner{0};

// A fork waits until no NPU is half open: the child would have a lock file that nobody
// closes, and the lock of this file without a thread that lets it go.
void before_fork() { mutex.lock(); }

void after_fork_in_parent() { mutex.unlock(); }

void after_fork_in_child() {
  mutex.unlock();
  const pid_t parent = owner.load();
  if (parent == 0) return;
  forked_from = parent;
  // A lock belongs to the open file, which the child shares: a copy left open would
  // keep the NPU held after the owner has ended.
  for (const auto& [npu, file] : held()) close(file);
}

// From when the library is loaded: a fork may come during the first open.
const int watching_forks =
    pthread_atfork(before_fork, after_fork_in_parent, after_fork_in_child);

// The command line of this process, arguments separated by blanks.
std::string command_line() {
  std::string text(4096, '\0');
  const int file = open("/proc/self/cmdline", O_RDONLY | O_CLOEXEC);
  const ssize_t got = file < 0 ? 0 : read(file, text.data(), text.size());
  if (file >= 0) close(file);
  text.resize(got > 0 ? static_cast<size_t>(got) : 0);
  while (!text.empty() && text.back() == '\0') text.pop_back();
  for (char& c : text) {
    if (c == '\0' || c == '\n') c = ' ';
  }
  return text;
}

std::string json_text(const std::string& text) {
  std::string quoted = "\"";
  for (const char c : text) {
    if (c == '"' || c == '\\') {
      quoted += '\\';
      quoted += c;
    } else if (static_cast<unsigned char>(c) < 0x20) {
      quoted += ' ';
    } else {
      quoted += c;
    }
  }
  return quoted + '"';
}

void make_state_dir(const std::string& path) {
  if (mkdir(path.c_str(), 0700) != 0 && errno != EEXIST) {
    refuse(kFailure, "cannot make the folder ", path, " (", std::strerror(errno),
           "); RBLN_SIM_STATE_DIR names another");
  }
  struct stat info{};
  if (lstat(path.c_str(), &info) != 0 || !S_ISDIR(info.st_mode) ||
      info.st_uid != geteuid()) {
    refuse(kFailure, path,
           " is not a folder of this user; RBLN_SIM_STATE_DIR names another");
  }
}

std::string who_holds(int file) {
  std::string text(4096, '\0');
  const ssize_t got = pread(file, text.data(), text.size(), 0);
  text.resize(got > 0 ? static_cast<size_t>(got) : 0);
  return text.empty() ? "another process" : text;
}

int lock_npu(unsigned npu) {
  const std::string path =
      settings().state_dir + "/npu" + std::to_string(npu) + ".lock";
  const int file = open(path.c_str(), O_RDWR | O_CREAT | O_CLOEXEC | O_NOFOLLOW, 0600);
  if (file < 0) {
    refuse(kFailure, "cannot open ", path, ": ", std::strerror(errno),
           "; RBLN_SIM_STATE_DIR names another folder");
  }
  if (flock(file, LOCK_EX | LOCK_NB) != 0) {
    const std::string holder = who_holds(file);
    close(file);
    refuse(kFailure, "NPU ", npu, " is held by ", holder);
  }
  const std::string text =
      "pid " + std::to_string(getpid()) + " (" + command_line() + ")";
  if (ftruncate(file, 0) != 0 ||
      pwrite(file, text.data(), text.size(), 0) != static_cast<ssize_t>(text.size())) {
    close(file);
    refuse(kFailure, "cannot write ", path, ": ", std::strerror(errno),
           "; RBLN_SIM_STATE_DIR names another folder");
  }
  return file;
}

void log_open(unsigned npu) {
  const std::string& path = settings().open_log;
  if (path.empty()) return;
  timespec now{};
  clock_gettime(CLOCK_REALTIME, &now);
  char time_text[64];
  snprintf(time_text, sizeof time_text, "%lld.%06ld",
           static_cast<long long>(now.tv_sec), now.tv_nsec / 1000);
  const std::string line =
      "{\"pid\": " + std::to_string(getpid()) + ", \"npu\": " + std::to_string(npu) +
      ", \"time\": " + time_text + ", \"argv\": " + json_text(command_line()) + "}\n";
  const int file = open(path.c_str(), O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0644);
  if (file < 0) {
    refuse(kFailure, "cannot open RBLN_SIM_OPEN_LOG='", path,
           "': ", std::strerror(errno));
  }
  const bool written =
      write(file, line.data(), line.size()) == static_cast<ssize_t>(line.size());
  close(file);
  if (!written) refuse(kFailure, "cannot write RBLN_SIM_OPEN_LOG='", path, "'");
}

}  // namespace

void open_npus(const std::vector<unsigned>& npus) {
  std::lock_guard<std::mutex> lock(mutex);
  if (watching_forks != 0) refuse(kFailure, "cannot watch for fork()");
  make_state_dir(settings().state_dir);
  std::map<unsigned, int> opened;
  try {
    for (const unsigned npu : npus) {
      if (held().count(npu) == 0 && opened.count(npu) == 0) {
        opened.emplace(npu, lock_npu(npu));
      }
    }
    for (const auto& [npu, file] : opened) log_open(npu);
  } catch (...) {
    for (const auto& [npu, file] : opened) close(file);
    throw;
  }
  held().insert(opened.begin(), opened.end());
  owner = getpid();
}

void refuse_forked() {
  const pid_t parent = forked_from.load(std::memory_order_relaxed);
  if (parent != 0) {
    refuse(kFailure, "this process was forked from process ", parent,
           ", which owns the NPU; the child cannot use it. Start the process with the "
           "spawn method, or fork before the first use of the NPU");
  }
}

}  // namespace rbln_sim
