// SPDX-License-Identifier: Apache-2.0
#include <atomic>
#include <thread>

#include "api/abi.h"
#include "harness.h"

using namespace rbln;

namespace {

constexpr uint64_t kSize = 1 << 16;

uint64_t make_lazy(uint64_t size = kSize) {
  uint64_t vaddr = 0;
  CHECK_EQ(rbln_malloc_lazy(0, size, vaddr), kSuccess);
  return vaddr;
}

std::string read_all(uint64_t vaddr, uint64_t size = kSize) {
  std::string text(size, '?');
  CHECK_EQ(rbln_memcpy_v2h(vaddr, reinterpret_cast<uint64_t>(text.data()), size),
           kSuccess);
  return text;
}

uint64_t used() { return rbln_get_memory_stats(0).GetAllocatedCurrent(); }

}  // namespace

TEST(lazy_takes_nothing_eager_takes_memory) {
  make_lazy(1ull << 36);
  CHECK_EQ(used(), 0u);
  uint64_t vaddr;
  CHECK_EQ(rbln_malloc_eager(0, kSize, vaddr), kSuccess);
  CHECK_EQ(used(), kSize);
  CHECK_EQ(rbln_free(vaddr), kSuccess);
  CHECK_EQ(used(), 0u);
}

TEST(out_of_memory_is_reported_and_counted) {
  uint64_t vaddr = 42;
  CHECK_FAILS(kFailure, "rbln_malloc_eager: out of device memory",
              rbln_malloc_eager(0, 2ull << 30, vaddr));
  CHECK_EQ(vaddr, 42u);
  CHECK_EQ(rbln_get_memory_stats(0).GetNumOoms(), 1u);
  const uint64_t lazy = make_lazy(2ull << 30);
  CHECK_FAILS(kFailure, "rbln_set_raw_memory_alloc: out of device memory",
              rbln_set_raw_memory_alloc(lazy, 2ull << 30));
  CHECK_EQ(rbln_get_memory_stats(0).GetNumOoms(), 2u);
  CHECK_EQ(rbln_malloc_eager(1, 1 << 30, vaddr), kSuccess);
}

TEST(binding_wants_the_whole_allocation) {
  const uint64_t vaddr = make_lazy();
  CHECK_FAILS(kInvalid, "is inside the allocation",
              rbln_set_raw_memory_alloc(vaddr + 512, 512));
  CHECK_FAILS(kInvalid, "run past the end",
              rbln_set_raw_memory_alloc(vaddr, kSize + 1));
  CHECK_EQ(rbln_set_raw_memory_alloc(vaddr, kSize), kSuccess);
  CHECK_EQ(rbln_set_raw_memory_alloc(vaddr, kSize), kSuccess);
  CHECK_EQ(used(), kSize);
}

TEST(frees_of_what_is_not_live_are_refused) {
  const uint64_t vaddr = make_lazy();
  CHECK_FAILS(kInvalid, "is inside the allocation", rbln_free(vaddr + 1));
  CHECK_EQ(rbln_free(vaddr), kSuccess);
  CHECK_FAILS(kInvalid, "rbln_free: 0x", rbln_free(vaddr));
  CHECK_FAILS(kInvalid, "is not a device address", rbln_free(1));
}

TEST(mark_zeros_wants_the_start) {
  const uint64_t vaddr = make_lazy();
  const std::string text(kSize, 'x');
  rbln_memcpy_h2v(reinterpret_cast<uint64_t>(text.data()), vaddr, kSize);
  CHECK_FAILS(kInvalid, "is inside the allocation", rbln_mark_zeros(vaddr + 1));
  CHECK_EQ(rbln_mark_zeros(vaddr), kSuccess);
  CHECK_EQ(read_all(vaddr), std::string(kSize, '\0'));
}

TEST(info_of_interior_addresses) {
  const uint64_t vaddr = make_lazy();
  MemoryInfo info{};
  CHECK_EQ(rbln_get_memory_info(vaddr + 100, info), kSuccess);
  CHECK_EQ(info.key_vaddr, vaddr);
  CHECK(info.user_dtype == DataType::Undefined);
  CHECK_EQ(rbln_set_memory_info(vaddr, DataType::Float16, DataType::Float16, {2, 3}),
           kSuccess);
  CHECK_EQ(rbln_get_memory_info(vaddr, info), kSuccess);
  CHECK((info.user_shape == std::vector<int64_t>{2, 3}));
  uint32_t id = 42;
  CHECK_EQ(rbln_get_torch_device_id_from_vaddr(vaddr + kSize - 1, id), kSuccess);
  CHECK_EQ(id, 0u);
  CHECK_FAILS(kInvalid, "rbln_get_torch_device_id_from_vaddr",
              rbln_get_torch_device_id_from_vaddr(vaddr + kSize, id));
  CHECK_FAILS(
      kInvalid, "there is no data type 17",
      rbln_set_memory_info(vaddr, static_cast<DataType>(17), DataType::Bool, {}));
  CHECK_FAILS(kInvalid, "negative extent -1",
              rbln_set_memory_info(vaddr, DataType::Bool, DataType::Bool, {2, -1}));
}

TEST(a_layout_is_taken_from_a_resident_reference) {
  const uint64_t target = make_lazy(), reference = make_lazy();
  rbln_set_memory_info(reference, DataType::BFloat16, DataType::BFloat16, {4});
  CHECK_FAILS(kInvalid, "is not in device memory",
              rbln_set_device_alloc_layout_like(target, reference));
  rbln_set_raw_memory_alloc(reference, kSize);
  CHECK_EQ(rbln_set_device_alloc_layout_like(target, reference), kSuccess);
  MemoryInfo info;
  rbln_get_memory_info(target, info);
  CHECK(info.user_dtype == DataType::BFloat16);
  CHECK(info.user_shape.empty());
  CHECK_EQ(used(), 2 * kSize);
  uint64_t elsewhere;
  rbln_malloc_eager(1, kSize, elsewhere);
  CHECK_FAILS(kInvalid, "the target is on rbln:0, the reference on rbln:1",
              rbln_set_device_alloc_layout_like(target, elsewhere));
}

TEST(borrowing_and_returning) {
  const uint64_t vaddr = make_lazy();
  uint64_t host = 0, id = 0;
  CHECK_EQ(rbln_v_acquire_host_ptr_for_overwrite(vaddr, kSize, host, id), kSuccess);
  CHECK(id != 0);
  std::memset(reinterpret_cast<void*>(host), 'a', kSize);
  CHECK_EQ(rbln_v_return_borrowed(id, true), kSuccess);
  CHECK_EQ(read_all(vaddr), std::string(kSize, 'a'));

  CHECK_EQ(rbln_set_raw_memory_alloc(vaddr, kSize), kSuccess);
  uint64_t second_id = 0;
  CHECK_EQ(rbln_v_borrow_host_ptr(vaddr + 2, 3, host, second_id), kSuccess);
  CHECK(second_id != id);
  CHECK_EQ(std::string(reinterpret_cast<char*>(host), 3), "aaa");
  std::memcpy(reinterpret_cast<void*>(host), "bcd", 3);
  CHECK_EQ(rbln_v_return_borrowed(second_id, true), kSuccess);
  CHECK_EQ(read_all(vaddr).substr(0, 7), "aabcdaa");
}

TEST(a_loan_returned_unchanged_changes_nothing) {
  const uint64_t vaddr = make_lazy();
  rbln_set_raw_memory_alloc(vaddr, kSize);
  uint64_t host, id;
  rbln_v_borrow_host_ptr(vaddr, kSize, host, id);
  std::memset(reinterpret_cast<void*>(host), 'x', kSize);
  CHECK_EQ(rbln_v_return_borrowed(id, false), kSuccess);
  CHECK_EQ(read_all(vaddr), std::string(kSize, '\0'));
}

TEST(a_loan_is_checked_and_returned_once) {
  const uint64_t vaddr = make_lazy();
  uint64_t host, id;
  CHECK_FAILS(kInvalid, "rbln_v_borrow_host_ptr",
              rbln_v_borrow_host_ptr(vaddr + 1, kSize, host, id));
  CHECK_EQ(rbln_v_borrow_host_ptr(vaddr, kSize, host, id), kSuccess);
  CHECK_EQ(rbln_v_return_borrowed(id, true), kSuccess);
  CHECK_FAILS(kInvalid, "nothing is lent under the id",
              rbln_v_return_borrowed(id, true));
}

TEST(a_loan_outlives_its_allocation) {
  const uint64_t vaddr = make_lazy();
  uint64_t host, id;
  rbln_v_borrow_host_ptr(vaddr, kSize, host, id);
  CHECK_EQ(rbln_free(vaddr), kSuccess);
  std::memset(reinterpret_cast<void*>(host), 'x', kSize);
  CHECK_EQ(rbln_v_return_borrowed(id, true), kSuccess);
}

TEST(impossible_sizes_are_refused) {
  uint64_t vaddr = 42;
  for (const uint64_t size :
       {uint64_t{0}, UINT64_MAX, UINT64_MAX / 2, uint64_t{1} << 42}) {
    CHECK_EQ(rbln_malloc_lazy(0, size, vaddr) == kSuccess, false);
    CHECK_EQ(rbln_malloc_eager(0, size, vaddr) == kSuccess, false);
  }
  CHECK_EQ(vaddr, 42u);
  CHECK_EQ(used(), 0u);
}

TEST(of_threads_that_free_at_once_one_does) {
  for (int round = 0; round < 50; ++round) {
    const uint64_t vaddr = make_lazy();
    std::atomic<int> freed{0};
    std::vector<std::thread> threads;
    for (int t = 0; t < 4; ++t) {
      threads.emplace_back([&] { freed += rbln_free(vaddr) == kSuccess; });
    }
    for (std::thread& thread : threads) thread.join();
    CHECK_EQ(freed.load(), 1);
  }
}

TEST(freeing_while_threads_copy_is_safe) {
  const std::string text(kSize, 'x');
  for (int round = 0; round < 20; ++round) {
    uint64_t vaddr;
    CHECK_EQ(rbln_malloc_eager(0, kSize, vaddr), kSuccess);
    CHECK_EQ(rbln_memcpy_h2v(reinterpret_cast<uint64_t>(text.data()), vaddr, kSize),
             kSuccess);
    std::atomic<int> wrong{0}, copied{0};
    std::vector<std::thread> threads;
    for (int t = 0; t < 4; ++t) {
      threads.emplace_back([&] {
        std::string got(kSize, '?');
        uint64_t handle;
        // Until the address is stale.
        while (rbln_memcpy_v2h_async(vaddr, reinterpret_cast<uint64_t>(got.data()),
                                     kSize, &handle) == kSuccess) {
          wrong += rbln_stream_synchronize(0) != kSuccess || got != text;
          ++copied;
        }
      });
    }
    while (copied < 8) std::this_thread::yield();
    CHECK_EQ(rbln_free(vaddr), kSuccess);
    for (std::thread& thread : threads) thread.join();
    CHECK_EQ(wrong.load(), 0);
    CHECK_EQ(used(), 0u);
  }
}

HARNESS_MAIN()
