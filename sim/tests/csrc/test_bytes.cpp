// SPDX-License-Identifier: Apache-2.0
#include "memory/space.h"

#include <algorithm>
#include <fstream>

#include "harness.h"

using rbln_sim::Bytes;

namespace {

constexpr size_t kSizes[] = {1, 63, 4096, (256 << 10) - 1, 256 << 10, 3 << 20};

bool all_are(const Bytes& bytes, char value) {
  return std::all_of(bytes.data(), bytes.data() + bytes.size(),
                     [value](char c) { return c == value; });
}

size_t resident_pages() {
  size_t total, resident;
  std::ifstream("/proc/self/statm") >> total >> resident;
  return resident;
}

}  // namespace

TEST(a_buffer_starts_as_zeros) {
  for (const size_t size : kSizes) {
    const Bytes bytes(size);
    CHECK_EQ(bytes.size(), size);
    CHECK(all_are(bytes, 0));
  }
}

TEST(zero_makes_all_bytes_zero_again) {
  for (const size_t size : kSizes) {
    Bytes bytes(size);
    std::memset(bytes.data(), 7, size);
    CHECK(all_are(bytes, 7));
    bytes.zero();
    CHECK(all_are(bytes, 0));
    std::memset(bytes.data(), 9, size);
    CHECK(all_are(bytes, 9));
  }
}

TEST(data_is_aligned_for_vector_loads) {
  for (const size_t size : kSizes) {
    CHECK_EQ(reinterpret_cast<uintptr_t>(Bytes(size).data()) % 64, 0u);
  }
}

TEST(memory_is_taken_where_it_is_written) {
  const size_t before = resident_pages();
  Bytes bytes(size_t{8} << 30);
  std::memset(bytes.data() + (size_t{4} << 30), 1, 1 << 20);
  CHECK(resident_pages() - before < (64 << 20) / 4096);
}

TEST(an_impossible_size_is_bad_alloc) {
  bool thrown = false;
  try {
    Bytes bytes(size_t{1} << 62);
  } catch (const std::bad_alloc&) {
    thrown = true;
  }
  CHECK(thrown);
}

HARNESS_MAIN()
