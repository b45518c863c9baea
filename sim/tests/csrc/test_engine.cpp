// SPDX-License-Identifier: Apache-2.0
#include "engine.h"

#include <algorithm>

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

TEST(a_queued_copy_is_done_with_its_ticket) {
  const auto stream = create_stream(0);
  Buffers buffers;
  stream->wait(copy_on(*stream, buffers.job()));
  CHECK_EQ(buffers.dst, buffers.src);
}

TEST(a_queued_copy_keeps_its_owners) {
  const auto stream = create_stream(0);
  Buffers buffers;
  auto owner = std::make_shared<int>(0);
  const std::weak_ptr<int> watched = owner;
  CopyJob job = buffers.job();
  job.src_owner = std::move(owner);
  stream->wait(copy_on(*stream, std::move(job)));
  CHECK(watched.expired());
}

TEST(a_deferred_copy_shows_poison_until_it_is_done) {
  setenv("RBLN_SIM_DEFERRED", "1", 1);
  const auto stream = create_stream(0);
  bool seen = false;
  // A busy machine may stop this thread for as long as a copy takes: then once more.
  for (int i = 0; i < 100 && !seen; ++i) {
    Buffers buffers;
    const uint64_t ticket = copy_on(*stream, buffers.job());
    const char* last = buffers.dst.data() + kSize - 1;
    int found = 'd';
    while (found == 'd') found = peek(last);
    CHECK(found == kPoison || found == 's');
    // Poison that was looked at before, and a copy that is not done behind it.
    seen = found == kPoison && !stream->done(ticket);
    stream->wait(ticket);
    CHECK_EQ(buffers.dst, buffers.src);
  }
  CHECK(seen);
}

TEST(poison_comes_in_stream_order) {
  // The second copy reads what the first one wrote, into the first one's source: poison
  // at submission would be copied.
  setenv("RBLN_SIM_DEFERRED", "1", 1);
  const auto stream = create_stream(0);
  Buffers buffers;
  std::string third(kSize, 't');
  copy_on(*stream,
          {Kind::kD2H, third.data(), buffers.dst.data(), kSize, nullptr, nullptr});
  stream->wait(copy_on(*stream, buffers.job()));
  CHECK_EQ(third, std::string(kSize, 'd'));
  CHECK_EQ(buffers.dst, buffers.src);
}

TEST(a_deferred_copy_onto_itself_is_right) {
  setenv("RBLN_SIM_DEFERRED", "1", 1);
  const auto stream = create_stream(0);
  std::string bytes = "0123456789";
  stream->wait(copy_on(
      *stream, {Kind::kD2D, bytes.data() + 2, bytes.data(), 8, nullptr, nullptr}));
  CHECK_EQ(bytes, "0101234567");
}

TEST(delays_are_from_1_to_50_ms_and_follow_the_seed) {
  std::vector<int64_t> delays;
  for (uint64_t position = 0; position < 10000; ++position) {
    const auto delay = deferred_delay(7, 3, position);
    CHECK(delay == deferred_delay(7, 3, position));
    delays.push_back(delay.count());
  }
  CHECK(*std::min_element(delays.begin(), delays.end()) >= 1000);
  CHECK(*std::min_element(delays.begin(), delays.end()) < 1500);
  CHECK(*std::max_element(delays.begin(), delays.end()) <= 50000);
  CHECK(*std::max_element(delays.begin(), delays.end()) > 49500);
  CHECK(deferred_delay(7, 3, 0) != deferred_delay(8, 3, 0));
  CHECK(deferred_delay(7, 3, 0) != deferred_delay(7, 4, 0));
}

HARNESS_MAIN()
