// SPDX-License-Identifier: Apache-2.0
#include "stream/event.h"

#include <shared_mutex>
#include <unordered_map>

#include "device/device.h"
#include "device/owner.h"
#include "refusal.h"

namespace rbln_sim {
namespace {

struct Events {
  std::shared_mutex mutex;
  std::unordered_map<uint64_t, std::shared_ptr<Event>> by_handle;
  uint32_t count = 0;
};

Events& events() {
  static Events* instance = new Events();
  return *instance;
}

}  // namespace

void Event::record(std::shared_ptr<Stream> stream) {
  if (stream->device() != device()) {
    refuse(kInvalid, "the event is of rbln:", device(),
           ", the stream of rbln:", stream->device());
  }
  std::lock_guard<std::mutex> lock(mutex_);
  mark_.ticket = stream->newest();
  mark_.stream = std::move(stream);
}

Event::Mark Event::mark() const {
  std::lock_guard<std::mutex> lock(mutex_);
  return mark_;
}

bool Event::done() const {
  const Mark now = mark();
  if (now.stream == nullptr) return true;
  return now.stream->query(now.ticket);
}

void Event::synchronize() const {
  const Mark now = mark();
  if (now.stream != nullptr) now.stream->wait(now.ticket);
}

void Event::hold(Stream& stream) const {
  const Mark now = mark();
  if (now.stream == nullptr || now.stream.get() == &stream) return;
  if (now.stream->done(now.ticket) && !now.stream->failed(now.ticket)) return;
  // Marks lie before everything queued later, so waits cannot form a circle. A failure
  // before the mark becomes one of this stream.
  Work edge([now] { now.stream->tell_failure(now.ticket); });
  edge.behind = now.stream;
  edge.mark = now.ticket;
  stream.submit(std::move(edge));
}

uint64_t create_event(uint32_t device_id) {
  device(device_id);
  Events& all = events();
  std::unique_lock<std::shared_mutex> lock(all.mutex);
  uint64_t handle;
  do {
    if (++all.count == 0) ++all.count;
    handle = uint64_t{device_id} << 32 | all.count;
  } while (all.by_handle.count(handle) != 0);
  all.by_handle.emplace(handle, std::make_shared<Event>(handle));
  return handle;
}

void destroy_event(uint64_t handle) {
  refuse_forked();
  Events& all = events();
  std::unique_lock<std::shared_mutex> lock(all.mutex);
  if (all.by_handle.erase(handle) == 0)
    refuse(kInvalid, hex(handle), " is not an event");
}

std::shared_ptr<Event> find_event(uint64_t handle) {
  refuse_forked();
  Events& all = events();
  std::shared_lock<std::shared_mutex> lock(all.mutex);
  const auto found = all.by_handle.find(handle);
  if (found == all.by_handle.end()) refuse(kInvalid, hex(handle), " is not an event");
  return found->second;
}

}  // namespace rbln_sim
