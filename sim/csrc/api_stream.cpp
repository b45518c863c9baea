// SPDX-License-Identifier: Apache-2.0
//
// Streams and events. There is no call that destroys a stream: torch-rbln keeps a fixed
// pool of them per device.
#include "api.h"
#include "device.h"
#include "event.h"
#include "stream.h"

using namespace rbln_sim;

namespace rbln {

RetCode rbln_device_synchronize(uint32_t device_id) {
  return use(__func__, [&] { drain_device(device_id); });
}

RetCode rbln_stream_create(uint32_t device_id, uint64_t* stream) {
  return use(__func__, [&] { out(stream) = create_stream(device_id)->handle(); });
}

RetCode rbln_stream_query(uint64_t stream, bool* done) {
  return use(__func__, [&] {
    const auto found = find_stream(stream);
    out(done) = found->done(found->newest());
  });
}

RetCode rbln_stream_synchronize(uint64_t stream) {
  return use(__func__, [&] {
    const auto found = find_stream(stream);
    found->wait(found->newest());
  });
}

RetCode rbln_stream_wait_event(uint64_t stream, uint64_t event) {
  return use(__func__, [&] { find_event(event)->hold(*find_stream(stream)); });
}

RetCode rbln_get_current_stream(uint32_t device_id, uint64_t* stream) {
  return use(__func__, [&] { out(stream) = current_stream(device_id)->handle(); });
}

RetCode rbln_set_current_stream(uint32_t device_id, uint64_t stream) {
  return use(__func__, [&] { set_current_stream(device_id, stream); });
}

RetCode rbln_event_create(uint32_t device_id, uint64_t* event) {
  return use(__func__, [&] { out(event) = create_event(device_id); });
}

RetCode rbln_event_destroy(uint64_t event) {
  return use(__func__, [&] { destroy_event(event); });
}

RetCode rbln_event_record(uint64_t event, uint64_t stream) {
  return use(__func__, [&] { find_event(event)->record(find_stream(stream)); });
}

RetCode rbln_event_query(uint64_t event, bool* done) {
  return use(__func__, [&] { out(done) = find_event(event)->done(); });
}

RetCode rbln_event_synchronize(uint64_t event) {
  return use(__func__, [&] { find_event(event)->synchronize(); });
}

}  // namespace rbln
