// SPDX-License-Identifier: Apache-2.0
#include "api/abi.h"
#include "harness.h"

using namespace rbln;

namespace {

constexpr uint64_t kSize = 1 << 12;

struct Copy {
  uint64_t device_bytes = 0;
  std::string host = std::string(kSize, 'h');

  Copy() {
    CHECK_EQ(rbln_malloc_eager(0, kSize, device_bytes), kSuccess);
    const std::string text(kSize, 'd');
    rbln_memcpy_h2v(reinterpret_cast<uint64_t>(text.data()), device_bytes, kSize);
  }
  void start() {
    uint64_t handle = 0;
    CHECK_EQ(rbln_memcpy_v2h_async(
                 device_bytes, reinterpret_cast<uint64_t>(host.data()), kSize, &handle),
             kSuccess);
    CHECK(handle != 0);
  }
  void check_done() { CHECK_EQ(host, std::string(kSize, 'd')); }
};

uint64_t make_stream() {
  uint64_t stream = 0;
  CHECK_EQ(rbln_stream_create(0, &stream), kSuccess);
  return stream;
}

uint64_t make_event() {
  uint64_t event = 0;
  CHECK_EQ(rbln_event_create(0, &event), kSuccess);
  return event;
}

}  // namespace

TEST(the_default_stream_is_number_0) {
  uint64_t stream = 42;
  CHECK_EQ(rbln_get_current_stream(0, &stream), kSuccess);
  CHECK_EQ(stream, 0u);
  CHECK_EQ(rbln_get_current_stream(1, &stream), kSuccess);
  CHECK_EQ(stream, 1ull << 32);
}

TEST_IN_EVERY_MODE(copies_are_done_after_each_kind_of_wait) {
  const uint64_t stream = make_stream(), event = make_event();
  CHECK_EQ(rbln_set_current_stream(0, stream), kSuccess);
  for (int kind = 0; kind < 5; ++kind) {
    Copy copy;
    copy.start();
    bool done = false;
    switch (kind) {
      case 0:
        CHECK_EQ(rbln_stream_synchronize(stream), kSuccess);
        break;
      case 1:
        CHECK_EQ(rbln_device_synchronize(0), kSuccess);
        break;
      case 2:
        CHECK_EQ(rbln_event_record(event, stream), kSuccess);
        CHECK_EQ(rbln_event_synchronize(event), kSuccess);
        break;
      case 3:
        while (!done) CHECK_EQ(rbln_stream_query(stream, &done), kSuccess);
        break;
      case 4:
        CHECK_EQ(rbln_event_record(event, stream), kSuccess);
        while (!done) CHECK_EQ(rbln_event_query(event, &done), kSuccess);
        break;
    }
    copy.check_done();
  }
}

TEST_IN_EVERY_MODE(a_stream_of_any_device_waits_for_an_event) {
  for (const uint32_t device : {0u, 1u}) {
    const uint64_t first = make_stream(), event = make_event();
    uint64_t second = 0;
    CHECK_EQ(rbln_stream_create(device, &second), kSuccess);
    Copy copy;
    rbln_set_current_stream(0, first);
    copy.start();
    CHECK_EQ(rbln_event_record(event, first), kSuccess);
    CHECK_EQ(rbln_stream_wait_event(second, event), kSuccess);
    CHECK_EQ(rbln_event_destroy(event), kSuccess);
    CHECK_EQ(rbln_stream_synchronize(second), kSuccess);
    copy.check_done();
  }
}

TEST(streams_and_events_of_another_device_are_told_apart) {
  uint64_t other_stream = 0, other_event = 0;
  CHECK_EQ(rbln_stream_create(1, &other_stream), kSuccess);
  CHECK_EQ(rbln_event_create(1, &other_event), kSuccess);
  CHECK_FAILS(kInvalid, "is of rbln:1, not of rbln:0",
              rbln_set_current_stream(0, other_stream));
  CHECK_FAILS(kInvalid, "the event is of rbln:0, the stream of rbln:1",
              rbln_event_record(make_event(), other_stream));
  CHECK_FAILS(kInvalid, "the event is of rbln:1, the stream of rbln:0",
              rbln_event_record(other_event, 0));
}

TEST(what_does_not_exist_is_refused) {
  bool done;
  uint64_t handle;
  CHECK_FAILS(kInvalid, "is not a stream", rbln_stream_query(77, &done));
  CHECK_FAILS(kInvalid, "is not a stream", rbln_stream_synchronize(77));
  CHECK_FAILS(kInvalid, "is not a stream", rbln_set_current_stream(0, 77));
  CHECK_FAILS(kInvalid, "is not an event", rbln_event_query(77, &done));
  CHECK_FAILS(kInvalid, "is not an event", rbln_event_synchronize(77));
  CHECK_FAILS(kInvalid, "is not an event", rbln_event_destroy(77));
  CHECK_FAILS(kInvalid, "is not an event", rbln_event_record(77, 0));
  CHECK_FAILS(kInvalid, "is not an event", rbln_stream_wait_event(0, 77));
  CHECK_FAILS(kInvalid, "there is no device", rbln_stream_create(5, &handle));
  CHECK_FAILS(kInvalid, "there is no device", rbln_event_create(5, &handle));
  CHECK_FAILS(kInvalid, "there is no device", rbln_device_synchronize(5));
  CHECK_FAILS(kInvalid, "there is no device", rbln_get_current_stream(5, &handle));
  CHECK_FAILS(kInvalid, "null", rbln_stream_query(0, nullptr));
}

HARNESS_MAIN()
