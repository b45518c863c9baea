// SPDX-License-Identifier: Apache-2.0
//
// The head <-> token transposition between paged KV blocks, staged in host memory, and
// token-major chunks. Knows nothing of devices: whoever stages blocks on the host can
// use it.
//
// A tile is dense in staging memory, [blocks, planes, heads, slots, row], a row being
// the bytes of one head of one token. In its chunk it is the window
// [planes, blocks * slots tokens, heads, row] of one layer, of any strides whose rows
// are dense.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

namespace kv_transpose {

enum class Direction {
  kGather,   // staging -> chunk
  kScatter,  // chunk -> staging
};

/// A chunk in host memory, [planes, layers, tokens, heads, row]; strides are in bytes
/// and those of a head and of a byte are dense.
struct Chunk {
  char* data = nullptr;
  int64_t planes = 0;
  int64_t layers = 0;
  int64_t tokens = 0;
  int64_t plane_stride = 0;
  int64_t layer_stride = 0;
  int64_t token_stride = 0;
};

/// One tile; a row of the table that callers pass, hence eight bytes each and in order.
struct Tile {
  int64_t staged;  // offset in the staging buffer, bytes
  int64_t chunk;   // index of the chunk
  int64_t layer;
  int64_t plane;
  int64_t planes;
  int64_t token;
  int64_t blocks;
  int64_t slots;  // tokens of each block
  int64_t head;
  int64_t heads;
};
constexpr int kTileColumns = sizeof(Tile) / sizeof(int64_t);

struct Job {
  Direction direction = Direction::kGather;
  char* staging = nullptr;
  int64_t staging_bytes = 0;
  std::vector<Chunk> chunks;
  int64_t heads = 0;      // of every chunk
  int64_t row_bytes = 0;  // of one head of one token
  const Tile* tiles = nullptr;
  int64_t num_tiles = 0;
};

/// Throws std::invalid_argument, naming the tile, unless every tile lies inside the
/// staging buffer and inside its chunk.
void check(const Job& job);

/// Moves every tile of a checked job, in the calling thread and up to `threads - 1`
/// helpers. Chunk memory that two tiles of a gather share, or staging memory that two
/// tiles of a scatter share, gets the bytes of either.
void run(const Job& job, int threads);

}  // namespace kv_transpose
