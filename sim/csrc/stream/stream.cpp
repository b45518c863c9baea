// SPDX-License-Identifier: Apache-2.0
#include "stream/stream.h"

#include <pthread.h>
#include <signal.h>

#include <algorithm>
#include <exception>
#include <map>
#include <optional>
#include <shared_mutex>
#include <string>
#include <system_error>
#include <thread>
#include <unordered_map>
#include <utility>
#include <vector>

#include "device/device.h"
#include "device/owner.h"
#include "faults/faults.h"
#include "refusal.h"
#include "stream/clock.h"
#include "stream/trace.h"

namespace rbln_sim {
namespace {

struct Streams {
  std::shared_mutex mutex;
  std::map<uint64_t, std::shared_ptr<Stream>> by_handle;
  std::map<uint32_t, uint32_t> count;  // device -> highest number
};

Streams& streams() {
  static Streams* instance = new Streams();
  return *instance;
}

uint64_t handle_of(uint32_t device, uint32_t number) {
  return uint64_t{device} << 32 | number;
}

// How long a stream looks for work before its thread sleeps. A copy engine need not be
// woken; a thread is, after each pause between two copies, and late: on a virtual
// machine by up to milliseconds.
constexpr int64_t kPollNs = 1'000'000;

// device -> handle of the current stream, where it is not the default one.
thread_local std::unordered_map<uint32_t, uint64_t> current;

std::shared_ptr<Stream> find_known(uint64_t handle) {
  Streams& all = streams();
  std::shared_lock<std::shared_mutex> lock(all.mutex);
  const auto found = all.by_handle.find(handle);
  return found == all.by_handle.end() ? nullptr : found->second;
}

}  // namespace

uint64_t Stream::submit(Work work) {
  if (Scheduler* deferred = scheduler())
    return deferred->submit(*this, std::move(work));
  uint64_t ticket;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    if (!started_) start();
    queue_.push_back(std::move(work));
    ticket = submitted_.load(std::memory_order_relaxed) + 1;
    submitted_.store(ticket, std::memory_order_release);
  }
  work_ready_.notify_one();
  return ticket;
}

void Stream::start() {
  // Signals are for the program's own threads.
  sigset_t all, before;
  sigfillset(&all);
  pthread_sigmask(SIG_SETMASK, &all, &before);
  try {
    // Detached: a stream lives as long as the process, and work that hangs must not
    // keep the process from ending.
    std::thread([self = shared_from_this()] { self->run(); }).detach();
    started_ = true;
  } catch (const std::system_error& error) {
    pthread_sigmask(SIG_SETMASK, &before, nullptr);
    refuse(kFailure, "cannot start a thread for the stream: ", error.what());
  }
  pthread_sigmask(SIG_SETMASK, &before, nullptr);
}

void Stream::run() {
  const std::string name = "rbln" + std::to_string(device()) + "-s" +
                           std::to_string(static_cast<uint32_t>(handle_));
  pthread_setname_np(pthread_self(), name.substr(0, 15).c_str());
  std::unique_lock<std::mutex> lock(mutex_);
  for (;;) {
    if (queue_.empty()) {
      lock.unlock();
      poll();
      lock.lock();
    }
    work_ready_.wait(lock, [this] { return !queue_.empty(); });
    Work work = std::move(queue_.front());
    queue_.pop_front();
    lock.unlock();
    if (work.behind) work.behind->reach(work.mark);
    attempt(work.run);
    work = {};
    lock.lock();
    completed_.fetch_add(1, std::memory_order_release);
    progress_.notify_all();
  }
}

void Stream::poll() const {
  const int64_t end = now_ns() + kPollNs;
  while (done(newest()) && now_ns() < end) std::this_thread::yield();
}

void Stream::attempt(const std::function<void()>& work) {
  std::string message;
  try {
    work();
    return;
  } catch (const std::exception& error) {
    message = error.what();
  }
  std::lock_guard<std::mutex> lock(mutex_);
  const uint64_t ticket = completed_.load(std::memory_order_relaxed) + 1;
  failures_.push_back({ticket, std::move(message)});
  ever_failed_.store(true, std::memory_order_release);
}

void Stream::reach(uint64_t ticket) {
  if (done(ticket)) return;
  std::unique_lock<std::mutex> lock(mutex_);
  progress_.wait(lock, [&] { return done(ticket); });
}

void Stream::wait(uint64_t ticket) {
  if (Scheduler* deferred = scheduler()) {
    deferred->wait(*this, ticket);
  } else {
    reach(ticket);
  }
  tell_failure(ticket);
}

bool Stream::query(uint64_t ticket) {
  Scheduler* deferred = scheduler();
  if (!(deferred ? deferred->query(*this, ticket) : done(ticket))) return false;
  tell_failure(ticket);
  return true;
}

Stream::Failed* Stream::failure_before(uint64_t ticket) {
  for (Failed& failure : failures_) {
    if (failure.ticket <= ticket && ticket <= failure.told_at) return &failure;
  }
  return nullptr;
}

void Stream::tell_failure(uint64_t ticket) {
  if (!ever_failed_.load(std::memory_order_acquire)) return;
  std::lock_guard<std::mutex> lock(mutex_);
  const Failed* first = failure_before(ticket);
  if (first == nullptr) return;
  const uint64_t newest = submitted_.load(std::memory_order_relaxed);
  for (Failed& failure : failures_) {
    if (failure.ticket <= ticket) failure.told_at = std::min(failure.told_at, newest);
  }
  refuse(kFailure, "an earlier operation on the stream ", hex(handle_),
         " failed: ", first->message);
}

bool Stream::failed(uint64_t ticket) {
  if (!ever_failed_.load(std::memory_order_acquire)) return false;
  std::lock_guard<std::mutex> lock(mutex_);
  return failure_before(ticket) != nullptr;
}

std::shared_ptr<Stream> create_stream(uint32_t device_id) {
  device(device_id);
  Streams& all = streams();
  std::unique_lock<std::shared_mutex> lock(all.mutex);
  const uint64_t handle = handle_of(device_id, ++all.count[device_id]);
  return all.by_handle[handle] = std::make_shared<Stream>(handle);
}

std::shared_ptr<Stream> find_stream(uint64_t handle) {
  refuse_forked();
  if (auto known = find_known(handle)) return known;
  const auto device_id = static_cast<uint32_t>(handle >> 32);
  if (handle != handle_of(device_id, 0))
    refuse(kInvalid, hex(handle), " is not a stream");
  device(device_id);
  Streams& all = streams();
  std::unique_lock<std::shared_mutex> lock(all.mutex);
  auto& stream = all.by_handle[handle];
  if (!stream) stream = std::make_shared<Stream>(handle);
  return stream;
}

std::shared_ptr<Stream> current_stream(uint32_t device_id) {
  const auto set = current.find(device_id);
  return find_stream(set == current.end() ? handle_of(device_id, 0) : set->second);
}

void set_current_stream(uint32_t device_id, uint64_t handle) {
  const auto stream = find_stream(handle);
  if (stream->device() != device_id) {
    refuse(kInvalid, "stream ", hex(handle), " is of rbln:", stream->device(),
           ", not of rbln:", device_id);
  }
  current[device_id] = handle;
}

void drain_current_stream(uint32_t device_id) {
  faults().refuse_lost(device_id);
  const auto stream = current_stream(device_id);
  const uint64_t ticket = stream->newest();
  if (stream->done(ticket) || !traced(Kind::kSync)) {
    stream->wait(ticket);
    return;
  }
  const int64_t begin = now_ns();
  stream->wait(ticket);
  write_trace(
      {Kind::kSync, thread_number(), 0, 0, device_id, std::nullopt, begin, now_ns()});
}

void drain_device(uint32_t device_id) {
  faults().refuse_lost(device_id);
  device(device_id);
  std::vector<std::pair<std::shared_ptr<Stream>, uint64_t>> pending;
  {
    Streams& all = streams();
    std::shared_lock<std::shared_mutex> lock(all.mutex);
    const auto end = all.by_handle.lower_bound(handle_of(device_id + 1, 0));
    for (auto it = all.by_handle.lower_bound(handle_of(device_id, 0)); it != end;
         ++it) {
      pending.emplace_back(it->second, it->second->newest());
    }
  }
  if (Scheduler* deferred = scheduler()) deferred->run_all(pending);
  std::exception_ptr failure;
  for (const auto& [stream, ticket] : pending) {
    try {
      stream->wait(ticket);
    } catch (const Refusal&) {
      if (!failure) failure = std::current_exception();
    }
  }
  if (failure) std::rethrow_exception(failure);
}

}  // namespace rbln_sim
