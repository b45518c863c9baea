// SPDX-License-Identifier: Apache-2.0
//
// What a program sees of a fault, through the exported calls.
#include "api/abi.h"
#include "harness.h"
#include "stream/operation.h"

using namespace rbln;

namespace {

constexpr uint64_t kSize = 1 << 12;

uint64_t address(const void* pointer) { return reinterpret_cast<uint64_t>(pointer); }

uint64_t make_bound(uint32_t device = 0) {
  uint64_t vaddr = 0;
  CHECK_EQ(rbln_malloc_eager(device, kSize, vaddr), kSuccess);
  return vaddr;
}

uint64_t make_stream(uint32_t device = 0) {
  uint64_t stream = 0;
  CHECK_EQ(rbln_stream_create(device, &stream), kSuccess);
  CHECK_EQ(rbln_set_current_stream(device, stream), kSuccess);
  return stream;
}

void set_faults(const char* rules) { setenv("RBLN_SIM_FAULTS", rules, 1); }

std::string half_poisoned(char c) {
  return std::string(kSize / 2, c) +
         std::string(kSize / 2, static_cast<char>(rbln_sim::kPoison));
}

}  // namespace

TEST_IN_EVERY_MODE(a_synchronous_copy_that_fails_moves_nothing) {
  set_faults("fail:h2d:1");
  const uint64_t vaddr = make_bound();
  const std::string text(kSize, 'x');
  std::string got(kSize, '?');
  CHECK_FAILS(kFailure, "rbln_memcpy_h2v: h2d failed (fault fail:h2d:1)",
              rbln_memcpy_h2v(address(text.data()), vaddr, kSize));
  CHECK_EQ(rbln_memcpy_v2h(vaddr, address(got.data()), kSize), kSuccess);
  CHECK_EQ(got, std::string(kSize, '\0'));
  CHECK_EQ(rbln_memcpy_h2v(address(text.data()), vaddr, kSize), kSuccess);
}

TEST_IN_EVERY_MODE(a_batch_that_fails_is_done_half) {
  set_faults("fail:d2h:1");
  const uint64_t vaddr = make_bound();
  std::string got(4, '?');
  std::vector<CopyEntry> entries;
  for (uint64_t i = 0; i < 4; ++i) {
    entries.push_back({vaddr + i, address(got.data() + i), 1});
  }
  CHECK_FAILS(kFailure, "d2h failed", rbln_memcpy_v2h_multi(entries));
  CHECK_EQ(got, std::string("\0\0??", 4));
}

TEST_IN_EVERY_MODE(an_asynchronous_copy_fails_where_it_is_waited_for) {
  set_faults("fail:d2h:1");
  const uint64_t vaddr = make_bound(), stream = make_stream();
  std::string first(kSize, '?'), second(kSize, '?');
  uint64_t handle, event;
  CHECK_EQ(rbln_event_create(0, &event), kSuccess);
  CHECK_EQ(rbln_memcpy_v2h_async(vaddr, address(first.data()), kSize, &handle),
           kSuccess);
  CHECK_EQ(rbln_memcpy_v2h_async(vaddr, address(second.data()), kSize, &handle),
           kSuccess);
  CHECK_EQ(rbln_event_record(event, stream), kSuccess);
  CHECK_FAILS(kFailure, "d2h failed (fault fail:d2h:1)", rbln_event_synchronize(event));
  bool done;
  CHECK_EQ(rbln_event_query(event, &done), kFailure);
  CHECK_EQ(rbln_stream_query(stream, &done), kFailure);
  CHECK_EQ(rbln_stream_synchronize(stream), kFailure);
  CHECK_EQ(rbln_device_synchronize(0), kFailure);
  CHECK_EQ(first, half_poisoned('\0'));
  CHECK_EQ(second, std::string(kSize, '\0'));
  // One-shot: what is queued after the report is well.
  CHECK_EQ(rbln_memcpy_v2h_async(vaddr, address(first.data()), kSize, &handle),
           kSuccess);
  CHECK_EQ(rbln_stream_synchronize(stream), kSuccess);
  CHECK_EQ(first, second);
}

TEST_IN_EVERY_MODE(a_synchronous_copy_behind_a_failure_fails) {
  set_faults("fail:h2d:1");
  const uint64_t vaddr = make_bound();
  make_stream();
  std::string text(kSize, 'x'), got(kSize, '?');
  uint64_t handle;
  rbln_memcpy_h2v_async(address(text.data()), vaddr, kSize, &handle);
  CHECK_EQ(rbln_memcpy_v2h(vaddr, address(got.data()), kSize), kFailure);
  CHECK_EQ(got, std::string(kSize, '?'));
}

TEST_IN_EVERY_MODE(a_failure_goes_on_to_streams_that_wait_for_it) {
  set_faults("fail:d2h:1");
  const uint64_t vaddr = make_bound(), failing = make_stream();
  std::string got(kSize, '?');
  uint64_t handle, event, waiting;
  rbln_memcpy_v2h_async(vaddr, address(got.data()), kSize, &handle);
  rbln_event_create(0, &event);
  rbln_event_record(event, failing);
  CHECK_EQ(rbln_stream_create(1, &waiting), kSuccess);
  CHECK_EQ(rbln_stream_wait_event(waiting, event), kSuccess);
  CHECK_FAILS(kFailure, "d2h failed", rbln_stream_synchronize(waiting));
}

TEST_IN_EVERY_MODE(a_delayed_copy_is_late_and_right) {
  set_faults("delay:d2h:1:500ms");
  const uint64_t vaddr = make_bound(), stream = make_stream();
  std::string got(kSize, '?');
  uint64_t handle;
  bool done = true;
  rbln_memcpy_v2h_async(vaddr, address(got.data()), kSize, &handle);
  CHECK_EQ(rbln_stream_query(stream, &done), kSuccess);
  CHECK(!done);
  CHECK_EQ(rbln_stream_synchronize(stream), kSuccess);
  CHECK_EQ(got, std::string(kSize, '\0'));
}

TEST_IN_EVERY_MODE(a_copy_that_hangs_is_never_done_and_the_process_ends) {
  set_faults("hang:d2h:1");
  const uint64_t vaddr = make_bound(), stream = make_stream(), other = make_stream();
  // The stream's thread keeps it until the process ends.
  static auto* got = new std::string(kSize, '?');
  uint64_t handle;
  bool done = true;
  rbln_set_current_stream(0, stream);
  rbln_memcpy_v2h_async(vaddr, address(got->data()), kSize, &handle);
  CHECK_EQ(rbln_stream_synchronize(other), kSuccess);
  for (int i = 0; i < 10; ++i) {
    CHECK_EQ(rbln_stream_query(stream, &done), kSuccess);
    CHECK(!done);
  }
}

TEST_IN_EVERY_MODE(a_hang_with_a_time_becomes_a_failure) {
  set_faults("hang:d2h:1:10ms");
  const uint64_t vaddr = make_bound(), stream = make_stream();
  std::string got(kSize, '?');
  uint64_t handle;
  rbln_memcpy_v2h_async(vaddr, address(got.data()), kSize, &handle);
  CHECK_FAILS(kFailure, "d2h timed out", rbln_stream_synchronize(stream));
  CHECK_EQ(got, std::string(kSize, static_cast<char>(rbln_sim::kPoison)));
}

TEST_IN_EVERY_MODE(an_allocation_runs_out_of_memory) {
  set_faults("oom:alloc:2+sticky");
  uint64_t vaddr = make_bound();
  CHECK_FAILS(kFailure, "rbln_malloc_lazy: out of device memory",
              rbln_malloc_lazy(0, kSize, vaddr));
  CHECK_EQ(rbln_malloc_eager(0, kSize, vaddr), kFailure);
  CHECK_EQ(rbln_get_memory_stats(0).GetAllocatedCurrent(), kSize * 4);
}

TEST_IN_EVERY_MODE(everything_after_the_loss_of_a_device_fails) {
  set_faults("lost:0:2");
  const uint64_t vaddr = make_bound(), stream = make_stream();
  const uint64_t on_other = make_bound(1);
  std::string host(kSize, '?');
  uint64_t handle, event, other;
  rbln_event_create(0, &event);
  CHECK_EQ(rbln_memcpy_v2h(vaddr, address(host.data()), kSize), kSuccess);
  CHECK_FAILS(kFailure, "rbln:0 is lost (lost:0:2)",
              rbln_memcpy_v2h(vaddr, address(host.data()), kSize));
  bool done;
  uint64_t more;
  CHECK_EQ(rbln_memcpy_h2v_async(address(host.data()), vaddr, kSize, &handle),
           kFailure);
  CHECK_EQ(rbln_malloc_lazy(0, kSize, more), kFailure);
  CHECK_EQ(rbln_stream_synchronize(stream), kFailure);
  CHECK_EQ(rbln_stream_query(stream, &done), kFailure);
  CHECK_EQ(rbln_stream_create(0, &other), kFailure);
  CHECK_EQ(rbln_event_record(event, stream), kFailure);
  CHECK_EQ(rbln_event_query(event, &done), kFailure);
  CHECK_EQ(rbln_event_synchronize(event), kFailure);
  CHECK_EQ(rbln_device_synchronize(0), kFailure);
  CHECK_EQ(rbln_mark_zeros(vaddr), kFailure);
  CHECK_EQ(rbln_set_current_stream(0, 0), kSuccess);
  CHECK_EQ(rbln_event_destroy(event), kSuccess);
  CHECK_EQ(rbln_free(vaddr), kSuccess);
  CHECK_EQ(rbln_memcpy_v2h(on_other, address(host.data()), kSize), kSuccess);
  CHECK_EQ(rbln_device_synchronize(1), kSuccess);
}

HARNESS_MAIN()
