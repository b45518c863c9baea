// SPDX-License-Identifier: Apache-2.0
#include <fstream>

#include "api/abi.h"
#include "harness.h"
#include "memory/counters.h"
#include "stream/clock.h"

using namespace rbln;
using rbln_sim::counters;

namespace {

constexpr uint64_t kSize = 1 << 16;

uint64_t address(const void* pointer) { return reinterpret_cast<uint64_t>(pointer); }

uint64_t make_lazy(uint32_t device = 0, uint64_t size = kSize) {
  uint64_t vaddr = 0;
  CHECK_EQ(rbln_malloc_lazy(device, size, vaddr), kSuccess);
  return vaddr;
}

uint64_t make_bound(uint32_t device = 0, uint64_t size = kSize) {
  uint64_t vaddr = 0;
  CHECK_EQ(rbln_malloc_eager(device, size, vaddr), kSuccess);
  return vaddr;
}

void write(uint64_t vaddr, const std::string& text) {
  CHECK_EQ(rbln_memcpy_h2v(address(text.data()), vaddr, text.size()), kSuccess);
}

std::string read(uint64_t vaddr, uint64_t size = kSize) {
  std::string text(size, '?');
  CHECK_EQ(rbln_memcpy_v2h(vaddr, address(text.data()), size), kSuccess);
  return text;
}

uint64_t make_current_stream(uint32_t device = 0) {
  uint64_t stream;
  CHECK_EQ(rbln_stream_create(device, &stream), kSuccess);
  CHECK_EQ(rbln_set_current_stream(device, stream), kSuccess);
  return stream;
}

}  // namespace

TEST(copies_at_any_offset) {
  for (const uint64_t vaddr : {make_lazy(), make_bound()}) {
    write(vaddr, std::string(kSize, '.'));
    write(vaddr + 5, "hello");
    CHECK_EQ(read(vaddr, 12), ".....hello..");
    CHECK_EQ(read(vaddr + 6, 3), "ell");
  }
}

TEST(bounds_and_pointers_are_checked_before_a_byte_moves) {
  const uint64_t vaddr = make_bound();
  std::string host(2 * kSize, 'h');
  uint64_t handle;
  CHECK_FAILS(kInvalid, "rbln_memcpy_h2v: ",
              rbln_memcpy_h2v(address(host.data()), vaddr + 1, kSize));
  CHECK_FAILS(kInvalid, "rbln_memcpy_v2h: ",
              rbln_memcpy_v2h(vaddr, address(host.data()), kSize + 1));
  CHECK_FAILS(kInvalid, "rbln_memcpy_h2v_async: ",
              rbln_memcpy_h2v_async(address(host.data()), vaddr, kSize + 1, &handle));
  CHECK_FAILS(kInvalid, "rbln_memcpy_v2h_async: ",
              rbln_memcpy_v2h_async(vaddr + kSize, address(host.data()), 1, &handle));
  CHECK_FAILS(kInvalid, "is a device address where a host pointer is wanted",
              rbln_memcpy_h2v(vaddr, vaddr, 1));
  CHECK_FAILS(kInvalid, "is not a device address",
              rbln_memcpy_h2v(address(host.data()), address(host.data()), 1));
  CHECK_FAILS(kInvalid, "0 bytes", rbln_memcpy_h2v(address(host.data()), vaddr, 0));
  CHECK_FAILS(kInvalid, "0 bytes", rbln_memcpy_v2v(vaddr, vaddr, 0));
  CHECK_EQ(read(vaddr), std::string(kSize, '\0'));
  CHECK_EQ(host, std::string(2 * kSize, 'h'));
}

TEST_IN_EVERY_MODE(a_synchronous_copy_orders_behind_the_current_stream) {
  make_current_stream();
  const uint64_t vaddr = make_bound();
  const std::string first(kSize, '1'), second(kSize, '2');
  uint64_t handle = 0;
  CHECK_EQ(rbln_memcpy_h2v_async(address(first.data()), vaddr, kSize, &handle),
           kSuccess);
  CHECK(handle != 0);
  CHECK_EQ(read(vaddr), first);
  rbln_memcpy_h2v_async(address(first.data()), vaddr, kSize, &handle);
  write(vaddr, second);
  CHECK_EQ(read(vaddr), second);
}

TEST_IN_EVERY_MODE(an_asynchronous_copy_of_host_bytes_is_made_at_once) {
  const uint64_t vaddr = make_lazy();
  const std::string text(kSize, 'x');
  std::string got(kSize, '?');
  uint64_t handle = 42;
  CHECK_EQ(rbln_memcpy_h2v_async(address(text.data()), vaddr, kSize, &handle),
           kSuccess);
  CHECK_EQ(handle, 0u);
  handle = 42;
  CHECK_EQ(rbln_memcpy_v2h_async(vaddr, address(got.data()), kSize, &handle), kSuccess);
  CHECK_EQ(handle, 0u);
  CHECK_EQ(got, text);
}

TEST_IN_EVERY_MODE(copies_on_one_stream_are_in_order) {
  const uint64_t stream = make_current_stream();
  const uint64_t a = make_bound(), b = make_bound();
  const std::string text(kSize, 'x');
  std::string got(kSize, '?');
  uint64_t handle;
  rbln_memcpy_h2v_async(address(text.data()), a, kSize, &handle);
  CHECK_EQ(rbln_memcpy_v2v_async(a, b, kSize, &handle), kSuccess);
  CHECK(handle != 0);
  rbln_memcpy_v2h_async(b, address(got.data()), kSize, &handle);
  rbln_stream_synchronize(stream);
  CHECK_EQ(got, text);
}

TEST_IN_EVERY_MODE(memory_freed_in_flight_is_still_copied) {
  const uint64_t stream = make_current_stream();
  const uint64_t vaddr = make_bound();
  const std::string text(kSize, 'x');
  write(vaddr, text);
  std::string got(kSize, '?');
  uint64_t handle;
  rbln_memcpy_v2h_async(vaddr, address(got.data()), kSize, &handle);
  CHECK_EQ(rbln_free(vaddr), kSuccess);
  CHECK_FAILS(kInvalid, "is stale", rbln_memcpy_v2h(vaddr, address(got.data()), 1));
  if (getenv("RBLN_SIM_DEFERRED") == std::string("latest")) {
    CHECK(rbln_get_memory_stats(0).GetAllocatedCurrent() > 0);
  }
  rbln_stream_synchronize(stream);
  CHECK_EQ(got, text);
  CHECK_EQ(rbln_get_memory_stats(0).GetAllocatedCurrent(), 0u);
}

TEST(transfers_of_bound_memory_hide_nothing) {
  const uint64_t stream = make_current_stream();
  const uint64_t a = make_bound(), b = make_bound();
  std::string host(kSize, 'x');
  uint64_t handle;
  rbln_memcpy_h2v_async(address(host.data()), a, kSize, &handle);
  rbln_memcpy_v2h_async(a, address(host.data()), kSize, &handle);
  rbln_memcpy_v2v_async(a, b, kSize, &handle);
  rbln_stream_synchronize(stream);
  rbln_memcpy_v2v(a, b, kSize);
  rbln_memcpy_v2v_multi({{a, b, 10}, {a, b + 10, 10}});
  CHECK_EQ(counters().sync_d2h.count + counters().sync_h2d.count, 0u);
  CHECK_EQ(counters().hidden[0].count + counters().reject[1].count, 0u);
  rbln_memcpy_v2h_multi({{a, address(host.data()), 10}, {b, address(&host[10]), 5}});
  CHECK_EQ(counters().sync_d2h.count.load(), 2u);
  CHECK_EQ(counters().sync_d2h.bytes.load(), 15u);
}

TEST(a_device_copy_of_host_bytes_is_told) {
  const uint64_t a = make_lazy(), b = make_lazy();
  write(a, std::string(kSize, 'x'));
  CHECK_EQ(rbln_memcpy_v2v(a, b, kSize), kSuccess);
  CHECK_EQ(read(b), std::string(kSize, 'x'));
  CHECK_EQ(counters().hidden[0].count.load(), 1u);
  CHECK_EQ(counters().hidden[0].bytes.load(), kSize);
  CHECK_EQ(counters().reject[1].count.load(), 1u);
  CHECK_EQ(counters().sync_d2h.count.load(), 0u);
}

TEST(a_device_copy_makes_its_destination_resident) {
  const uint64_t a = make_bound(), b = make_lazy(), c = make_lazy();
  write(a, std::string(kSize, 'x'));
  write(c, std::string(kSize, 'c'));
  const uint64_t used = rbln_get_memory_stats(0).GetAllocatedCurrent();
  CHECK_EQ(rbln_memcpy_v2v(a, b, kSize), kSuccess);
  CHECK_EQ(rbln_get_memory_stats(0).GetAllocatedCurrent(), used + kSize);
  CHECK_EQ(read(b), std::string(kSize, 'x'));
  CHECK_EQ(rbln_memcpy_v2v(a, c + 1, 2), kSuccess);
  CHECK_EQ(read(c), std::string(kSize, 'c').replace(1, 2, "xx"));
}

TEST(a_device_copy_may_overlap_itself) {
  for (const uint64_t vaddr : {make_lazy(0, 10), make_bound(0, 10)}) {
    write(vaddr, "0123456789");
    CHECK_EQ(rbln_memcpy_v2v(vaddr, vaddr + 2, 8), kSuccess);
    CHECK_EQ(read(vaddr, 10), "0101234567");
  }
}

TEST_IN_EVERY_MODE(copies_between_devices) {
  make_current_stream(0);
  make_current_stream(1);
  const uint64_t a = make_bound(0), b = make_bound(1);
  const std::string text(kSize, 'x');
  uint64_t handle;
  rbln_memcpy_h2v_async(address(text.data()), a, kSize, &handle);
  CHECK_EQ(rbln_memcpy_v2v_async(a, b, kSize, &handle), kSuccess);
  CHECK_EQ(handle, 0u);
  CHECK_EQ(read(b), text);
}

TEST(batches) {
  const uint64_t a = make_bound(0), b = make_lazy(1);
  const std::string text = "abcdef";
  CHECK_EQ(rbln_memcpy_h2v_multi({{address(text.data()), a, 3},
                                  {address(text.data() + 3), a + 10, 3},
                                  {address(text.data()), b, 6}}),
           kSuccess);
  CHECK_EQ(read(a, 3) + read(a + 10, 3) + read(b, 6), "abcdefabcdef");
  std::string got(6, '?');
  CHECK_EQ(rbln_memcpy_v2h_multi(
               {{a + 10, address(got.data()), 3}, {b, address(got.data() + 3), 3}}),
           kSuccess);
  CHECK_EQ(got, "defabc");
  CHECK_EQ(rbln_memcpy_h2v_multi({}), kSuccess);
}

TEST(a_batch_is_refused_as_a_whole) {
  const uint64_t a = make_bound(), b = make_bound();
  write(a, std::string(kSize, 'a'));
  const std::string text = "xyz";
  std::string host(8, 'h');
  CHECK_FAILS(kInvalid, "rbln_memcpy_h2v_multi: two entries of the batch write",
              rbln_memcpy_h2v_multi(
                  {{address(text.data()), a, 3}, {address(text.data()), a + 2, 3}}));
  CHECK_FAILS(kInvalid, "rbln_memcpy_v2h_multi: two entries of the batch write",
              rbln_memcpy_v2h_multi(
                  {{a, address(host.data()), 4}, {a, address(host.data() + 3), 2}}));
  CHECK_FAILS(kInvalid, "rbln_memcpy_v2v_multi: two entries of the batch write",
              rbln_memcpy_v2v_multi({{a, b, 4}, {a + 8, b + 3, 4}}));
  CHECK_FAILS(kInvalid, "run past the end",
              rbln_memcpy_h2v_multi({{address(text.data()), a, 3},
                                     {address(text.data()), a + kSize - 1, 2}}));
  CHECK_EQ(read(a), std::string(kSize, 'a'));
  CHECK_EQ(read(b), std::string(kSize, '\0'));
  CHECK_EQ(host, "hhhhhhhh");
}

TEST(a_batch_of_host_bytes_is_served_on_the_host) {
  const uint64_t a = make_lazy(), b = make_lazy();
  write(a, std::string(kSize, 'x'));
  CHECK_EQ(rbln_memcpy_v2v_multi({{a, b, 4}, {a, b + 4, 4}}), kSuccess);
  CHECK_EQ(read(b, 9), std::string("xxxxxxxx") + '\0');
  CHECK_EQ(counters().hidden[0].count.load(), 2u);
  CHECK_EQ(counters().reject[1].count.load(), 2u);
}

TEST(a_copy_without_room_for_its_handle_moves_nothing) {
  const uint64_t vaddr = make_bound();
  std::string host(kSize, 'h');
  CHECK_FAILS(kInvalid, "null",
              rbln_memcpy_h2v_async(address(host.data()), vaddr, kSize, nullptr));
  CHECK_FAILS(kInvalid, "null",
              rbln_memcpy_v2h_async(vaddr, address(host.data()), kSize, nullptr));
  CHECK_FAILS(kInvalid, "null", rbln_memcpy_v2v_async(vaddr, vaddr, 1, nullptr));
  CHECK_EQ(read(vaddr), std::string(kSize, '\0'));
  CHECK_EQ(host, std::string(kSize, 'h'));
}

TEST(a_device_copy_between_data_types_goes_through_the_host_and_is_told) {
  for (const bool bound : {false, true}) {
    for (auto* tally : {&counters().hidden[1], &counters().reject[4],
                        &counters().sync_d2h, &counters().sync_h2d}) {
      tally->reset();
    }
    const uint64_t a = make_bound(), b = bound ? make_bound() : make_lazy();
    write(a, std::string(kSize, 'x'));
    rbln_set_memory_info(a, DataType::BFloat16, DataType::BFloat16, {kSize / 2});
    CHECK_EQ(rbln_memcpy_v2v(a, b, 8), kSuccess);  // of no type yet: any will do
    CHECK_EQ(counters().reject[4].count.load(), 0u);
    if (!bound) rbln_mark_zeros(b);
    rbln_set_memory_info(b, DataType::Int8, DataType::Int8, {kSize});
    counters().sync_h2d.reset();
    uint64_t handle = 42;
    CHECK_EQ(rbln_memcpy_v2v_async(a, b, kSize, &handle), kSuccess);
    CHECK_EQ(handle, 0u);
    CHECK_EQ(counters().hidden[0].count.load(), 0u);
    CHECK_EQ(counters().hidden[1].bytes.load(), kSize);
    CHECK_EQ(counters().reject[4].bytes.load(), kSize);
    CHECK_EQ(counters().sync_d2h.bytes.load(), kSize);
    CHECK_EQ(counters().sync_h2d.bytes.load(), bound ? kSize : 0);
    CHECK_EQ(read(b), std::string(kSize, 'x'));
    rbln_set_memory_info(b, DataType::BFloat16, DataType::BFloat16, {kSize / 2});
    CHECK_EQ(rbln_memcpy_v2v(a, b, kSize), kSuccess);
    CHECK_EQ(counters().reject[4].count.load(), 1u);
  }
}

TEST(the_trace_tells_what_crossed_and_what_was_hidden) {
  const std::string path = std::string(getenv("RBLN_SIM_STATE_DIR")) + ".trace";
  setenv("RBLN_SIM_TRACE", path.c_str(), 1);
  const uint64_t a = make_lazy(), b = make_bound();
  write(a, std::string(kSize, 'x'));    // waits on the host
  rbln_memcpy_v2v(a, b, 8);             // served by the host, which sends it down
  rbln_set_raw_memory_alloc(a, kSize);  // brings all of it down
  rbln_memcpy_v2v(a, b, kSize);
  uint64_t host, id;
  rbln_v_borrow_host_ptr(b, 4, host, id);  // brings up what is lent
  rbln_v_return_borrowed(id, true);        // and down again
  read(b, 5);
  std::vector<std::string> got;
  std::ifstream file(path);
  for (std::string line; std::getline(file, line);) {
    const auto part = [&](const char* name) {
      const size_t at = line.find(name) + std::strlen(name);
      return line.substr(at, line.find_first_of(",}", at) - at);
    };
    got.push_back(part("\"kind\": ") + part("\"bytes\": ") + part("\"via\": "));
  }
  const std::string all = std::to_string(kSize);
  const std::vector<std::string> want = {
      "\"h2d\"" + all + "\"host\"", "\"h2d\"8\"hidden\"",
      "\"d2d\"8\"host\"",           "\"h2d\"" + all + "\"hidden\"",
      "\"d2d\"" + all + "\"link\"", "\"d2h\"4\"hidden\"",
      "\"h2d\"4\"hidden\"",         "\"d2h\"5\"link\""};
  CHECK(got == want);
}

TEST(what_the_host_serves_costs_nothing_and_what_is_hidden_does) {
  setenv("RBLN_SIM_SUBMIT_US", "30000", 1);
  const auto took = [](const std::function<void()>& call) {
    const int64_t begin = rbln_sim::now_ns();
    call();
    return (rbln_sim::now_ns() - begin) / 30'000'000;
  };
  const uint64_t vaddr = make_lazy();
  int64_t fastest = INT64_MAX;
  for (int i = 0; i < 10; ++i) {
    fastest = std::min(fastest, took([&] { write(vaddr, "text"); }));
  }
  CHECK_EQ(fastest, 0);
  CHECK(took([&] { rbln_set_raw_memory_alloc(vaddr, kSize); }) >= 1);
  uint64_t host, id;
  CHECK(took([&] { rbln_v_borrow_host_ptr(vaddr, 4, host, id); }) >= 1);
  CHECK(took([&] { rbln_v_return_borrowed(id, true); }) >= 1);
}

TEST(a_batch_has_no_order_in_deferred_mode) {
  // Each entry reads what the one before it writes: only in order is a byte carried on.
  constexpr uint64_t kEntries = 64;
  for (const char* schedule : {"latest", "earliest", "1", "2"}) {
    const int status = harness::status_of_child([schedule] {
      setenv("RBLN_SIM_DEFERRED", schedule, 1);
      const uint64_t vaddr = make_bound();
      std::vector<CopyEntry> entries;
      for (uint64_t i = 0; i < kEntries; ++i)
        entries.push_back({vaddr + i, vaddr + i + 1, 1});
      write(vaddr, "x" + std::string(kEntries, '.'));
      CHECK_EQ(rbln_memcpy_v2v_multi(entries), kSuccess);
      const bool in_order = read(vaddr + kEntries, 1) == "x";
      CHECK_EQ(in_order, schedule == std::string("earliest"));
    });
    CHECK_EQ(status, 0);
  }
}

HARNESS_MAIN()
