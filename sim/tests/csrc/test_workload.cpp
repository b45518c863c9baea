// SPDX-License-Identifier: Apache-2.0
//
// Seeded random work of 8 threads on 4 streams of 2 devices, against a model in which
// every operation is done at once.
#include <list>
#include <random>
#include <thread>

#include "api/abi.h"
#include "harness.h"

using namespace rbln;

namespace {

constexpr int kThreads = 8;
// By mode and thread; sanitizers are 5 to 20 times slower.
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
constexpr int kSteps = 500;
#else
constexpr int kSteps = 4'000;
#endif
constexpr uint64_t kSize = 4096;
constexpr uint64_t kBuffers = 4;
constexpr int kSynchronizeEvery = 100;

uint64_t address(const void* pointer) { return reinterpret_cast<uint64_t>(pointer); }

// One thread: memory of its own on both devices, streams shared with other threads.
class Worker {
 public:
  Worker(unsigned seed, const std::vector<uint64_t> (&streams)[2])
      : random_(seed), streams_(streams) {
    for (uint32_t device = 0; device < 2; ++device) move_to(device, seed / 2 % 2);
    for (uint64_t i = 0; i < kBuffers; ++i) {
      memory_.push_back(make(i));
      model_.emplace_back(kSize, '\0');
    }
  }

  // What went wrong; empty if nothing did.
  std::string run() {
    for (int step = 0; step < kSteps; ++step) {
      if (!one()) return "step " + std::to_string(step);
      if (step % kSynchronizeEvery == 0) {
        for (uint32_t device = 0; device < 2; ++device) {
          ok(rbln_stream_synchronize(streams_[device][used_[device]]));
        }
        in_flight_.clear();
      }
      if (failed_) return "a call failed in step " + std::to_string(step);
    }
    for (uint64_t i = 0; i < kBuffers; ++i) {
      if (read(i, 0, kSize) != model_[i]) return "end";
    }
    return "";
  }

 private:
  uint64_t below(uint64_t limit) { return random_() % limit; }
  void ok(RetCode code) { failed_ |= code != kSuccess; }

  uint64_t make(uint64_t i) {
    uint64_t vaddr = 0;
    const auto device = static_cast<uint32_t>(i % 2);
    ok(below(2) != 0 ? rbln_malloc_eager(device, kSize, vaddr)
                     : rbln_malloc_lazy(device, kSize, vaddr));
    return vaddr;
  }

  void move_to(uint32_t device, unsigned stream) {
    used_[device] = stream;
    ok(rbln_set_current_stream(device, streams_[device][stream]));
  }

  std::string read(uint64_t i, uint64_t from, uint64_t length) {
    std::string got(length, '?');
    ok(rbln_memcpy_v2h(memory_[i] + from, address(got.data()), length));
    return got;
  }

  std::string random_text(uint64_t length) {
    std::string text(length, '\0');
    for (char& c : text) c = static_cast<char>(random_());
    return text;
  }

  bool one() {
    const uint64_t a = below(kBuffers), b = below(kBuffers);
    const uint64_t length = 1 + below(kSize);
    const uint64_t from = below(kSize + 1 - length), to = below(kSize + 1 - length);
    uint64_t handle = 0, host = 0, id = 0;
    switch (below(12)) {
      case 0:
      case 1:
        in_flight_.push_back(random_text(length));
        model_[a].replace(to, length, in_flight_.back());
        ok(rbln_memcpy_h2v_async(address(in_flight_.back().data()), memory_[a] + to,
                                 length, &handle));
        break;
      case 2:
        model_[b].replace(to, length, std::string(model_[a], from, length));
        ok(rbln_memcpy_v2v(memory_[a] + from, memory_[b] + to, length));
        break;
      case 3:
        model_[b].replace(to, length, std::string(model_[a], from, length));
        ok(rbln_memcpy_v2v_async(memory_[a] + from, memory_[b] + to, length, &handle));
        break;
      case 4:
        ok(rbln_mark_zeros(memory_[a]));
        model_[a].assign(kSize, '\0');
        break;
      case 5: {
        ok(rbln_v_borrow_host_ptr(memory_[a] + to, length, host, id));
        const std::string text = random_text(length);
        std::memcpy(reinterpret_cast<void*>(host), text.data(), length);
        ok(rbln_v_return_borrowed(id, true));
        model_[a].replace(to, length, text);
        break;
      }
      case 6:
        ok(rbln_free(memory_[a]));
        memory_[a] = make(a);
        model_[a].assign(kSize, '\0');
        break;
      case 7:
        ok(rbln_set_raw_memory_alloc(memory_[a], kSize));
        break;
      case 8: {
        // Go on on the device's other stream, behind what is queued on this one.
        const auto device = static_cast<uint32_t>(a % 2);
        const unsigned other = 1 - used_[device];
        ok(rbln_event_create(device, &handle));
        ok(rbln_event_record(handle, streams_[device][used_[device]]));
        ok(rbln_stream_wait_event(streams_[device][other], handle));
        ok(rbln_event_destroy(handle));
        move_to(device, other);
        break;
      }
      case 9: {
        const std::string text = random_text(3 * 16);
        std::vector<CopyEntry> entries;
        for (uint64_t i = 0; i < 3; ++i) {
          const uint64_t at = i * 1024 + below(1009);
          entries.push_back({address(text.data() + i * 16), memory_[a] + at, 16});
          model_[a].replace(at, 16, text, i * 16, 16);
        }
        ok(rbln_memcpy_h2v_multi(entries));
        break;
      }
      case 10: {
        std::string got(length, '?');
        ok(rbln_memcpy_v2h_async(memory_[a] + from, address(got.data()), length,
                                 &handle));
        const auto device = static_cast<uint32_t>(a % 2);
        ok(rbln_stream_synchronize(streams_[device][used_[device]]));
        return got == std::string(model_[a], from, length);
      }
      default:
        return read(a, from, length) == std::string(model_[a], from, length);
    }
    return true;
  }

  std::mt19937 random_;
  const std::vector<uint64_t> (&streams_)[2];
  unsigned used_[2] = {0, 0};
  std::vector<uint64_t> memory_;
  std::vector<std::string> model_;
  // Host memory that streams may still read.
  std::list<std::string> in_flight_;
  bool failed_ = false;
};

}  // namespace

TEST_IN_EVERY_MODE(random_work_of_many_threads_equals_a_sequential_model) {
  std::vector<uint64_t> streams[2];
  for (uint32_t device = 0; device < 2; ++device) {
    for (int i = 0; i < 2; ++i) {
      uint64_t handle = 0;
      CHECK_EQ(rbln_stream_create(device, &handle), kSuccess);
      streams[device].push_back(handle);
    }
  }
  std::vector<std::string> problems(kThreads);
  std::vector<std::thread> threads;
  for (int t = 0; t < kThreads; ++t) {
    threads.emplace_back(
        [&, t] { problems[t] = Worker(static_cast<unsigned>(t), streams).run(); });
  }
  for (std::thread& thread : threads) thread.join();
  for (int t = 0; t < kThreads; ++t) {
    CHECK_EQ("seed " + std::to_string(t) + ": " + problems[t],
             "seed " + std::to_string(t) + ": ");
  }
}

HARNESS_MAIN()
