// SPDX-License-Identifier: Apache-2.0
//
// Streams and events. There is no call that destroys a stream: torch-rbln keeps a fixed
// pool of them per device.
#include "stream/stream.h"
#include "api/api.h"
#include "device/device.h"
#include "faults/faults.h"
#include "stream/event.h"
#include "stream/operation.h"

using namespace rbln_sim;

namespace {

// Setting and asking for the current stream needs no device, so it works on a lost one:
// torch does it when it leaves a block.
std::shared_ptr<Stream> live_stream(uint64_t handle) {
  auto stream = find_stream(handle);
  faults().refuse_lost(stream->device());
  return stream;
}

std::shared_ptr<Event> live_event(uint64_t handle) {
  auto event = find_event(handle);
  faults().refuse_lost(event->device());
  return event;
}

template <typename Body>
void synchronize(uint32_t device_id, Body&& body) {
  perform({Kind::kSync, device_id}, [&](uint64_t) { body(); });
}

}  // namespace

namespace rbln {

RetCode rbln_device_synchronize(uint32_t device_id) {
  return use(__func__,
             [&] { synchronize(device_id, [&] { drain_device(device_id); }); });
}

RetCode rbln_stream_create(uint32_t device_id, uint64_t* stream) {
  return use(__func__, [&] {
    faults().refuse_lost(device_id);
    out(stream) = create_stream(device_id)->handle();
  });
}

RetCode rbln_stream_query(uint64_t stream, bool* done) {
  return use(__func__, [&] {
    const auto found = live_stream(stream);
    out(done) = found->query(found->newest());
  });
}

RetCode rbln_stream_synchronize(uint64_t stream) {
  return use(__func__, [&] {
    const auto found = live_stream(stream);
    synchronize(found->device(), [&] { found->wait(found->newest()); });
  });
}

RetCode rbln_stream_wait_event(uint64_t stream, uint64_t event) {
  return use(__func__, [&] { live_event(event)->hold(*live_stream(stream)); });
}

RetCode rbln_get_current_stream(uint32_t device_id, uint64_t* stream) {
  return use(__func__, [&] { out(stream) = current_stream(device_id)->handle(); });
}

RetCode rbln_set_current_stream(uint32_t device_id, uint64_t stream) {
  return use(__func__, [&] { set_current_stream(device_id, stream); });
}

RetCode rbln_event_create(uint32_t device_id, uint64_t* event) {
  return use(__func__, [&] {
    faults().refuse_lost(device_id);
    out(event) = create_event(device_id);
  });
}

RetCode rbln_event_destroy(uint64_t event) {
  return use(__func__, [&] { destroy_event(event); });
}

RetCode rbln_event_record(uint64_t event, uint64_t stream) {
  return use(__func__, [&] { live_event(event)->record(live_stream(stream)); });
}

RetCode rbln_event_query(uint64_t event, bool* done) {
  return use(__func__, [&] { out(done) = live_event(event)->done(); });
}

RetCode rbln_event_synchronize(uint64_t event) {
  return use(__func__, [&] {
    const auto found = live_event(event);
    synchronize(found->device(), [&] { found->synchronize(); });
  });
}

}  // namespace rbln
