// SPDX-License-Identifier: Apache-2.0
#include "stream/operation.h"

#include <thread>

#include "harness.h"

using namespace rbln_sim;

namespace {

constexpr uint64_t kSize = 1 << 16;

// Not instrumented: this looks at bytes that a stream is about to write, on purpose.
__attribute__((no_sanitize("thread"))) unsigned char peek(const char* at) {
  return static_cast<unsigned char>(*static_cast<const volatile char*>(at));
}

struct Buffers {
  std::string src = std::string(kSize, 's');
  std::string dst = std::string(kSize, 'd');
  CopyJob job() {
    return {Kind::kD2H, dst.data(), src.data(), kSize, nullptr, nullptr};
  }
};

}  // namespace

TEST(a_copy_now_is_done_on_return) {
  Buffers buffers;
  copy_now(buffers.dst.data(), buffers.src.data(), kSize);
  CHECK_EQ(buffers.dst, buffers.src);
}

TEST(overlapping_copies_are_right) {
  for (const bool upwards : {false, true}) {
    std::string bytes = "0123456789";
    char* low = bytes.data();
    if (upwards) {
      copy_now(low + 2, low, 8);
      CHECK_EQ(bytes, "0101234567");
    } else {
      copy_now(low, low + 2, 8);
      CHECK_EQ(bytes, "2345678989");
    }
  }
}

TEST_IN_EVERY_MODE(a_queued_copy_is_done_with_its_ticket) {
  const auto stream = create_stream(0);
  Buffers buffers;
  stream->wait(copy_on(*stream, buffers.job()));
  CHECK_EQ(buffers.dst, buffers.src);
}

TEST_IN_EVERY_MODE(a_queued_copy_keeps_its_owners) {
  const auto stream = create_stream(0);
  Buffers buffers;
  auto owner = std::make_shared<int>(0);
  const std::weak_ptr<int> watched = owner;
  CopyJob job = buffers.job();
  job.src_owner = std::move(owner);
  stream->wait(copy_on(*stream, std::move(job)));
  CHECK(watched.expired());
}

TEST_IN_EVERY_MODE(copies_on_one_stream_see_each_other) {
  // The second copy writes what the first one reads: poison at once would be copied.
  const auto stream = create_stream(0);
  Buffers buffers;
  std::string third(kSize, 't');
  copy_on(*stream,
          {Kind::kD2H, third.data(), buffers.dst.data(), kSize, nullptr, nullptr});
  stream->wait(copy_on(*stream, buffers.job()));
  CHECK_EQ(third, std::string(kSize, 'd'));
  CHECK_EQ(buffers.dst, buffers.src);
}

TEST_IN_EVERY_MODE(a_copy_onto_itself_is_right) {
  const auto stream = create_stream(0);
  std::string bytes = "0123456789";
  stream->wait(copy_on(
      *stream, {Kind::kD2D, bytes.data() + 2, bytes.data(), 8, nullptr, nullptr}));
  CHECK_EQ(bytes, "0101234567");
}

TEST(a_copy_that_a_fault_strikes_shows_poison_in_ordinary_mode_too) {
  setenv("RBLN_SIM_FAULTS", "hang:d2h:1", 1);
  const auto stream = create_stream(0);
  static auto* buffers = new Buffers();  // the stream's thread keeps it
  copy_on(*stream, buffers->job());
  while (peek(buffers->dst.data() + kSize - 1) != kPoison) std::this_thread::yield();
}

HARNESS_MAIN()
