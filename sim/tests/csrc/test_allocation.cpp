// SPDX-License-Identifier: Apache-2.0
#include "memory/allocation.h"

#include <thread>

#include "harness.h"
#include "memory/counters.h"
#include "memory/space.h"

using namespace rbln_sim;

namespace {

constexpr uint64_t kSize = 300 << 10;

std::shared_ptr<Allocation> make(uint64_t size = kSize) {
  return std::make_shared<Allocation>(device(0), AddressSpace::instance().take(size),
                                      size);
}

std::string pattern(uint64_t size = kSize, char start = 1) {
  std::string text(size, '\0');
  for (uint64_t i = 0; i < size; ++i) text[i] = static_cast<char>(start + i % 251);
  return text;
}

std::string read_all(Allocation& allocation) {
  std::string text(allocation.size(), '?');
  allocation.read(0, text.size(), text.data());
  return text;
}

void check_syncs(uint64_t d2h, uint64_t d2h_bytes, uint64_t h2d, uint64_t h2d_bytes) {
  CHECK_EQ(counters().sync_d2h.count.load(), d2h);
  CHECK_EQ(counters().sync_d2h.bytes.load(), d2h_bytes);
  CHECK_EQ(counters().sync_h2d.count.load(), h2d);
  CHECK_EQ(counters().sync_h2d.bytes.load(), h2d_bytes);
}

}  // namespace

TEST(out_of_memory_leaves_the_bytes_where_they_are) {
  const auto allocation = make();
  allocation->write(0, kSize, pattern().data());
  device(0).ledger.charge(1ull << 30);
  CHECK_REFUSED("out of device memory", allocation->bind());
  CHECK(!allocation->on_device());
  CHECK_EQ(read_all(*allocation), pattern());
}

TEST(a_view_is_valid_whatever_happens_meanwhile) {
  const auto allocation = make();
  char* view = allocation->device_target(0, 0).bytes;
  allocation->write(0, kSize, pattern().data());
  allocation->mark_zeros();
  CHECK_EQ(allocation->device_target(0, 0).bytes, view);
  CHECK_EQ(view[100], '\0');
}

TEST(writing_everything_to_device_latest_bytes_waits_on_the_host) {
  const auto allocation = make();
  allocation->device_target(0, 0);
  allocation->write(0, kSize, pattern().data());
  CHECK(!allocation->on_device());
  check_syncs(0, 0, 0, 0);
  CHECK_EQ(std::string(allocation->device_target(0, 0).bytes, kSize), pattern());
  check_syncs(0, 0, 1, kSize);
}

TEST(writing_a_part_of_device_latest_bytes_crosses) {
  const auto allocation = make();
  std::memcpy(allocation->device_target(0, 0).bytes, pattern().data(), kSize);
  allocation->write(1, 3, "abc");
  CHECK(allocation->on_device());
  check_syncs(0, 0, 1, 3);
  CHECK_EQ(read_all(*allocation), pattern().replace(1, 3, "abc"));
}

TEST(zeros_replace_all_earlier_bytes) {
  for (const bool was_on_device : {false, true}) {
    const auto allocation = make();
    allocation->write(0, kSize, pattern().data());
    if (was_on_device) allocation->device_target(0, 0);
    allocation->mark_zeros();
    CHECK_EQ(allocation->device_target(0, 0).bytes[kSize - 1], '\0');
    CHECK_EQ(read_all(*allocation), std::string(kSize, '\0'));
  }
  check_syncs(2, 2 * kSize, 1, kSize);  // zeros are not transferred
}

TEST(a_device_write_of_everything_moves_nothing_first) {
  const auto allocation = make();
  allocation->write(0, kSize, pattern().data());
  allocation->device_target(0, kSize);
  check_syncs(0, 0, 0, 0);
}

TEST(nothing_may_be_borrowed) {
  for (const bool bound : {false, true}) {
    const auto allocation = make();
    if (bound) allocation->bind();
    const Span lent = allocation->borrow(3, 0, false).span;
    CHECK(lent.bytes != nullptr);
    allocation->take_back(3, 0, lent);
    CHECK_EQ(read_all(*allocation), std::string(kSize, '\0'));
  }
}

TEST(bytes_to_be_overwritten_do_not_cross) {
  const auto allocation = make();
  allocation->bind();
  CHECK(!allocation->borrow(0, kSize, true).crossed);
  check_syncs(0, 0, 0, 0);
}

TEST(a_borrower_loses_no_write_to_another_part) {
  const auto allocation = make();
  const Span device_bytes = allocation->device_target(0, 0);
  const Span lent = allocation->borrow(0, 100, false).span;
  device_bytes.bytes[200] = 'x';  // a stream writes elsewhere meanwhile
  std::memset(lent.bytes, 'y', 100);
  allocation->take_back(0, 100, lent);
  const std::string got = read_all(*allocation);
  CHECK_EQ(got[0], 'y');
  CHECK_EQ(got[200], 'x');
}

TEST(a_borrower_may_return_after_the_bytes_went_to_the_device) {
  const auto allocation = make();
  const Span lent = allocation->borrow(0, 3, false).span;
  allocation->bind();
  std::memcpy(lent.bytes, "abc", 3);
  allocation->take_back(0, 3, lent);
  CHECK_EQ(read_all(*allocation).substr(0, 3), "abc");
}

TEST(parts_written_by_threads_survive_a_move_to_the_device) {
  constexpr uint64_t kPart = 1000;
  for (int round = 0; round < 50; ++round) {
    const auto allocation = make(4 * kPart);
    std::vector<std::thread> threads;
    std::vector<int> wrong(4, 0);
    for (int t = 0; t < 4; ++t) {
      threads.emplace_back([&, t] {
        for (char step = 1; step <= 20; ++step) {
          const std::string text(kPart, step);
          std::string got(kPart, '?');
          allocation->write(t * kPart, kPart, text.data());
          allocation->read(t * kPart, kPart, got.data());
          wrong[t] += got != text;
        }
      });
    }
    if (round % 2 == 0) {
      allocation->device_target(0, 0);
    } else {
      allocation->bind();
    }
    for (std::thread& thread : threads) thread.join();
    CHECK_EQ(wrong[0] + wrong[1] + wrong[2] + wrong[3], 0);
    CHECK_EQ(read_all(*allocation), std::string(4 * kPart, 20));
  }
}

HARNESS_MAIN()
