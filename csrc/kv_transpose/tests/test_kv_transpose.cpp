// SPDX-License-Identifier: Apache-2.0
//
// The kernel against an obvious reference, for the sanitizers.
#include <sys/wait.h>
#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "transpose.h"
#include "workers.h"

namespace kv = kv_transpose;

namespace {

int failures = 0;

void expect(bool holds, const std::string& what) {
  if (holds) return;
  std::fprintf(stderr, "FAILED: %s\n", what.c_str());
  ++failures;
}

/// Memory of exactly `size` bytes from `shift` on, so that sanitizers see every
/// overrun.
class Memory {
 public:
  Memory(int64_t size, int64_t shift)
      : bytes_(new char[static_cast<size_t>(size + shift)]), size_(size), at_(shift) {
    std::memset(bytes_.get(), 0, static_cast<size_t>(size + shift));
  }
  char* data() { return bytes_.get() + at_; }
  int64_t size() const { return size_; }
  std::vector<char> copy() const {
    return {bytes_.get() + at_, bytes_.get() + at_ + size_};
  }
  void fill(std::mt19937* random) {
    for (int64_t i = 0; i < size_; ++i) data()[i] = static_cast<char>((*random)());
  }

 private:
  std::unique_ptr<char[]> bytes_;
  int64_t size_;
  int64_t at_;
};

struct Sizes {
  int64_t planes, layers, tokens, heads, row, gap, shift;
};

int64_t pick(std::mt19937* random, int64_t from, int64_t to) {
  return std::uniform_int_distribution<int64_t>(from, to)(*random);
}

/// What a tile says, row by row: offsets in staging and in the chunk.
template <typename Visit>
void each_row(const kv::Job& job, const kv::Tile& tile, Visit&& visit) {
  const kv::Chunk& chunk = job.chunks[tile.chunk];
  int64_t staged = tile.staged;
  for (int64_t block = 0; block < tile.blocks; ++block) {
    for (int64_t plane = 0; plane < tile.planes; ++plane) {
      for (int64_t head = 0; head < tile.heads; ++head) {
        for (int64_t slot = 0; slot < tile.slots; ++slot) {
          const int64_t token = tile.token + block * tile.slots + slot;
          visit(staged, (tile.plane + plane) * chunk.plane_stride +
                            tile.layer * chunk.layer_stride +
                            token * chunk.token_stride +
                            (tile.head + head) * job.row_bytes);
          staged += job.row_bytes;
        }
      }
    }
  }
}

/// One random job in both directions, with 1 to 4 threads.
void random_job(uint32_t seed) {
  std::mt19937 random(seed);
  const Sizes sizes{pick(&random, 1, 2), pick(&random, 1, 3),  pick(&random, 1, 40),
                    pick(&random, 1, 5), pick(&random, 1, 80), pick(&random, 0, 20),
                    pick(&random, 0, 17)};
  kv::Job job;
  // Rows that are multiples of 16 go past the cache.
  job.row_bytes = seed % 2 == 0 ? sizes.row : 16 * ((sizes.row + 15) / 16);
  const int64_t gap = seed % 4 == 1 ? 16 * sizes.gap : sizes.gap;
  const int64_t shift = seed % 4 == 1 ? 0 : sizes.shift;
  const int64_t token_stride = sizes.heads * job.row_bytes + gap;
  const int64_t layer_stride = sizes.tokens * token_stride + gap;
  const int64_t plane_stride = sizes.layers * layer_stride + gap;
  std::vector<Memory> chunks;
  std::vector<kv::Chunk> windows;
  for (int i = 0; i < 2; ++i) {
    chunks.emplace_back(sizes.planes * plane_stride, shift);
    chunks.back().fill(&random);
    windows.push_back({chunks.back().data(), sizes.planes, sizes.layers, sizes.tokens,
                       plane_stride, layer_stride, token_stride});
  }
  // Tiles that share no byte: one per chunk and layer.
  std::vector<kv::Tile> tiles;
  int64_t staged = pick(&random, 0, 9);
  for (int64_t chunk = 0; chunk < 2; ++chunk) {
    for (int64_t layer = 0; layer < sizes.layers; ++layer) {
      kv::Tile tile{};
      tile.staged = staged;
      tile.chunk = chunk;
      tile.layer = layer;
      tile.plane = pick(&random, 0, sizes.planes - 1);
      tile.planes = pick(&random, 1, sizes.planes - tile.plane);
      tile.slots = pick(&random, 1, sizes.tokens);
      tile.blocks = pick(&random, 1, sizes.tokens / tile.slots);
      tile.token = pick(&random, 0, sizes.tokens - tile.blocks * tile.slots);
      tile.head = pick(&random, 0, sizes.heads - 1);
      tile.heads = pick(&random, 1, sizes.heads - tile.head);
      staged += tile.blocks * tile.planes * tile.heads * tile.slots * job.row_bytes;
      tiles.push_back(tile);
    }
  }
  job.chunks = windows.data();
  job.tiles = tiles.data();
  job.num_tiles = static_cast<int64_t>(tiles.size());
  Memory staging(staged, pick(&random, 0, 17));
  staging.fill(&random);
  job.staging = staging.data();

  const auto row = static_cast<size_t>(job.row_bytes);
  const int threads = static_cast<int>(pick(&random, 1, 4));
  const std::string name = "job " + std::to_string(seed);
  for (const auto direction : {kv::Direction::kGather, kv::Direction::kScatter}) {
    job.direction = direction;
    std::vector<char> wanted_staging = staging.copy();
    std::vector<std::vector<char>> wanted;
    for (const Memory& chunk : chunks) wanted.push_back(chunk.copy());
    for (const kv::Tile& tile : tiles) {
      char* window = wanted[static_cast<size_t>(tile.chunk)].data();
      each_row(job, tile, [&](int64_t at, int64_t offset) {
        char* in_staging = wanted_staging.data() + at;
        if (direction == kv::Direction::kGather) {
          std::memcpy(window + offset, in_staging, row);
        } else {
          std::memcpy(in_staging, window + offset, row);
        }
      });
    }
    kv::run(job, threads);
    expect(staging.copy() == wanted_staging, name + ": staging");
    for (size_t i = 0; i < chunks.size(); ++i) {
      expect(chunks[i].copy() == wanted[i], name + ": chunk " + std::to_string(i));
    }
    staging.fill(&random);
  }
}

/// Every index once, whatever the number of threads and of callers at a time.
void sharing() {
  for (const int threads : {1, 2, 5}) {
    std::vector<std::thread> callers;
    for (int caller = 0; caller < 3; ++caller) {
      callers.emplace_back([threads] {
        for (size_t count : {0, 1, 2, 100}) {
          std::vector<int> seen(count);
          kv::share(count, threads, [&](size_t index) { ++seen[index]; });
          for (const int times : seen)
            expect(times == 1, "an index was not shared once");
        }
      });
    }
    for (std::thread& caller : callers) caller.join();
  }
}

/// A child process has none of its parent's helpers, and must not wait for them.
void sharing_after_fork() {
  const pid_t child = fork();
  if (child == 0) {
    alarm(30);
    std::vector<int> seen(64);
    kv::share(seen.size(), 3, [&](size_t index) { seen[index] = 1; });
    for (const int times : seen) {
      if (times != 1) _exit(1);
    }
    _exit(0);
  }
  int status = 1;
  waitpid(child, &status, 0);
  expect(WIFEXITED(status) && WEXITSTATUS(status) == 0, "sharing after a fork");
}

}  // namespace

int main() {
  for (uint32_t seed = 0; seed < 400; ++seed) random_job(seed);
  sharing();
  sharing_after_fork();
  if (failures == 0) std::puts("kv_transpose: ok");
  return failures == 0 ? 0 : 1;
}
