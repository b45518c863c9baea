// SPDX-License-Identifier: Apache-2.0
#include <cstring>

#include "api/abi.h"
#include "api/rbln_sim.h"
#include "harness.h"

using namespace rbln;

namespace {

constexpr uint64_t kSize = 1 << 16;

}  // namespace

TEST(a_view_holds_the_newest_bytes_and_is_written_through) {
  uint64_t vaddr, host;
  rbln_malloc_lazy(0, kSize, vaddr);
  std::string text(kSize, 'x');
  rbln_memcpy_h2v(reinterpret_cast<uint64_t>(text.data()), vaddr, kSize);
  CHECK_EQ(rbln_sim_device_view(vaddr + 8, kSize - 8, &host), 0);
  char* view = reinterpret_cast<char*>(host);
  CHECK_EQ(view[0], 'x');
  view[0] = 'y';
  CHECK_EQ(rbln_memcpy_v2h(vaddr, reinterpret_cast<uint64_t>(text.data()), kSize),
           kSuccess);
  CHECK_EQ(text, std::string(kSize, 'x').replace(8, 1, "y"));
  CHECK_EQ(rbln_get_memory_stats(0).GetAllocatedCurrent(), kSize);
}

TEST(a_view_is_checked_like_a_copy) {
  uint64_t vaddr, host;
  rbln_malloc_lazy(0, kSize, vaddr);
  CHECK_FAILS(kInvalid, "rbln_sim_device_view",
              rbln_sim_device_view(vaddr, kSize + 1, &host));
  CHECK_FAILS(kInvalid, "null", rbln_sim_device_view(vaddr, kSize, nullptr));
  rbln_free(vaddr);
  CHECK_FAILS(kInvalid, "is stale", rbln_sim_device_view(vaddr, kSize, &host));
  rbln_malloc_lazy(0, 2ull << 30, vaddr);
  CHECK_FAILS(kFailure, "out of device memory", rbln_sim_device_view(vaddr, 1, &host));
}

TEST_IN_EVERY_MODE(a_graph_runs_behind_the_queued_copies) {
  uint64_t vaddr, stream, handle, host;
  rbln_malloc_eager(0, kSize, vaddr);
  rbln_stream_create(0, &stream);
  rbln_set_current_stream(0, stream);
  const std::string text(kSize, 'x');
  rbln_memcpy_h2v_async(reinterpret_cast<uint64_t>(text.data()), vaddr, kSize, &handle);
  CHECK(handle != 0);
  CHECK_EQ(rbln_sim_graph_begin(0), 0);
  CHECK_EQ(rbln_sim_device_view(vaddr, kSize, &host), 0);
  CHECK_EQ(std::string(reinterpret_cast<char*>(host), kSize), text);
}

TEST(what_the_runtime_was_not_told_of_the_host_does_not_see) {
  uint64_t vaddr, host, handle;
  rbln_malloc_eager(0, kSize, vaddr);
  CHECK_EQ(rbln_sim_device_view(vaddr, kSize, &host), 0);
  std::memset(reinterpret_cast<char*>(host), 'n', kSize);
  CHECK_EQ(rbln_sim_host_view_known(vaddr, 0), 0);
  const std::string poison(kSize, static_cast<char>(0xA5)), news(kSize, 'n');
  std::string text(kSize, 'x');
  const auto to = reinterpret_cast<uint64_t>(text.data());
  CHECK_EQ(rbln_memcpy_v2h(vaddr, to, kSize), kSuccess);
  CHECK_EQ(text, poison);
  text.assign(kSize, 'x');
  CHECK_EQ(rbln_memcpy_v2h_async(vaddr, to, kSize, &handle), kSuccess);
  CHECK_EQ(handle, 0u);
  CHECK_EQ(text, poison);
  uint64_t lent, borrow;
  CHECK_EQ(rbln_v_borrow_host_ptr(vaddr, kSize, lent, borrow), kSuccess);
  CHECK_EQ(std::string(reinterpret_cast<char*>(lent), kSize), poison);
  CHECK_EQ(rbln_v_return_borrowed(borrow, false), kSuccess);
  // The device itself sees them.
  uint64_t other;
  rbln_malloc_eager(0, kSize, other);
  CHECK_EQ(rbln_memcpy_v2v(vaddr, other, kSize), kSuccess);
  CHECK_EQ(rbln_memcpy_v2h(other, to, kSize), kSuccess);
  CHECK_EQ(text, news);
  CHECK_EQ(rbln_sim_host_view_known(vaddr, 1), 0);
  text.assign(kSize, 'x');
  CHECK_EQ(rbln_memcpy_v2h(vaddr, to, kSize), kSuccess);
  CHECK_EQ(text, news);
  // What the host wrote, it knows.
  CHECK_EQ(rbln_sim_host_view_known(vaddr, 0), 0);
  text.assign(kSize, 'h');
  CHECK_EQ(rbln_memcpy_h2v(to, vaddr, kSize), kSuccess);
  text.assign(kSize, 'x');
  CHECK_EQ(rbln_memcpy_v2h(vaddr, to, kSize), kSuccess);
  CHECK_EQ(text, std::string(kSize, 'h'));
}

TEST(an_allocation_is_found_by_any_of_its_addresses) {
  uint64_t vaddr, base, bytes;
  rbln_malloc_lazy(0, kSize, vaddr);
  CHECK_EQ(rbln_sim_allocation(vaddr + kSize - 1, &base, &bytes), 0);
  CHECK_EQ(base, vaddr);
  CHECK_EQ(bytes, kSize);
  CHECK_FAILS(kInvalid, "null", rbln_sim_allocation(vaddr, nullptr, &bytes));
  rbln_free(vaddr);
  CHECK_FAILS(kInvalid, "is stale", rbln_sim_allocation(vaddr, &base, &bytes));
}

TEST(asking_whether_a_device_is_open_opens_nothing) {
  uint32_t opened = 7;
  CHECK_EQ(rbln_sim_device_opened(0, &opened), 0);
  CHECK_EQ(opened, 0u);
  uint64_t vaddr;
  rbln_malloc_lazy(0, kSize, vaddr);
  CHECK_EQ(rbln_sim_device_opened(0, &opened), 0);
  CHECK_EQ(opened, 1u);
  CHECK_EQ(rbln_sim_device_opened(5, &opened), 0);
  CHECK_EQ(opened, 0u);
}

TEST(the_check_gives_its_reason_and_opens_nothing) {
  char reason[64] = "old";
  CHECK_EQ(rbln_sim_check(reason, sizeof reason), 0);
  CHECK_EQ(std::string(reason), "");
  setenv("RBLN_SIM_DEVICES", "many", 1);
  CHECK_FAILS(kInvalid, "RBLN_SIM_DEVICES='many'",
              rbln_sim_check(reason, sizeof reason));
  CHECK_EQ(std::string(reason).substr(0, 24), "RBLN_SIM_DEVICES='many' ");
  char small[4] = "old";
  CHECK_FAILS(kInvalid, "RBLN_SIM_DEVICES", rbln_sim_check(small, sizeof small));
  CHECK_EQ(std::string(small), "RBL");
  CHECK_FAILS(kInvalid, "RBLN_SIM_DEVICES", rbln_sim_check(nullptr, 0));
  CHECK(!std::filesystem::exists(getenv("RBLN_SIM_STATE_DIR")));
}

TEST(a_graph_has_an_end) {
  CHECK_FAILS(kInvalid, "no graph was begun on rbln:0", rbln_sim_graph_end(0));
  CHECK_EQ(rbln_sim_graph_begin(0), 0);
  CHECK_FAILS(kInvalid, "no graph was begun on rbln:1", rbln_sim_graph_end(1));
  CHECK_EQ(rbln_sim_graph_end(0), 0);
  CHECK_FAILS(kInvalid, "no graph was begun on rbln:0", rbln_sim_graph_end(0));
}

TEST(a_graph_that_a_fault_strikes_does_not_begin) {
  setenv("RBLN_SIM_FAULTS", "fail:graph:2", 1);
  CHECK_EQ(rbln_sim_graph_begin(0), 0);
  CHECK_EQ(rbln_sim_graph_end(0), 0);
  CHECK_FAILS(kFailure, "graph failed", rbln_sim_graph_begin(0));
  CHECK_FAILS(kInvalid, "no graph was begun", rbln_sim_graph_end(0));
  CHECK_EQ(rbln_sim_graph_begin(0), 0);
}

HARNESS_MAIN()
