// SPDX-License-Identifier: Apache-2.0
#include "workers.h"

#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <deque>
#include <memory>
#include <mutex>
#include <system_error>
#include <thread>

namespace kv_transpose {
namespace {

/// One call of share(). Helpers may come late, so they share its ownership; `work` is
/// only called while the caller waits.
struct Task {
  const std::function<void(size_t)>* work;
  size_t count;
  std::atomic<size_t> next{0};
  std::mutex mutex;
  std::condition_variable finished;
  size_t done = 0;

  void take_part() {
    size_t mine = 0;
    for (size_t index = next++; index < count; index = next++) {
      (*work)(index);
      ++mine;
    }
    if (mine == 0) return;
    const std::lock_guard<std::mutex> lock(mutex);
    done += mine;
    if (done == count) finished.notify_all();
  }
};

class Helpers {
 public:
  /// Asks up to `wanted` helpers to take part.
  void invite(const std::shared_ptr<Task>& task, size_t wanted) {
    {
      const std::lock_guard<std::mutex> lock(mutex_);
      while (started_ < wanted && start()) ++started_;
      wanted = std::min(wanted, started_);
      invitations_.insert(invitations_.end(), wanted, task);
    }
    while (wanted-- > 0) invited_.notify_one();
  }

 private:
  bool start() {
    try {
      std::thread([this] { serve(); }).detach();
    } catch (const std::system_error&) {
      return false;  // no more threads to be had: the caller does the work
    }
    return true;
  }

  [[noreturn]] void serve() {
    for (;;) {
      std::unique_lock<std::mutex> lock(mutex_);
      invited_.wait(lock, [this] { return !invitations_.empty(); });
      const std::shared_ptr<Task> task = std::move(invitations_.front());
      invitations_.pop_front();
      lock.unlock();
      task->take_part();
    }
  }

  std::mutex mutex_;
  std::condition_variable invited_;
  std::deque<std::shared_ptr<Task>> invitations_;
  size_t started_ = 0;
};

/// The helpers of this process. Never destroyed, since they wait for ever; those of a
/// parent process are not there after a fork, so the child has its own.
Helpers& helpers() {
  struct Owned {
    pid_t process;
    Helpers helpers;
  };
  static std::atomic<Owned*> current{nullptr};
  Owned* owned = current.load();
  if (owned != nullptr && owned->process == getpid()) return owned->helpers;
  auto* mine = new Owned{getpid(), {}};
  if (!current.compare_exchange_strong(owned, mine)) {
    delete mine;  // another thread was first; no helper has started yet
    return owned->helpers;
  }
  return mine->helpers;
}

}  // namespace

void share(size_t count, int threads, const std::function<void(size_t)>& work) {
  const int most = std::clamp(threads, 1, kMaxThreads);
  const auto others = static_cast<size_t>(most - 1);
  if (others == 0 || count < 2) {
    for (size_t index = 0; index < count; ++index) work(index);
    return;
  }
  const auto task = std::make_shared<Task>();
  task->work = &work;
  task->count = count;
  helpers().invite(task, std::min(others, count - 1));
  task->take_part();
  std::unique_lock<std::mutex> lock(task->mutex);
  task->finished.wait(lock, [&] { return task->done == count; });
}

}  // namespace kv_transpose
